"""``python -m hf_sparsebalance`` is ``sparsebalance``; ``accelerate launch -m hf_sparsebalance train`` needs it."""

import sys

from hf_sparsebalance.cli import main

sys.exit(main())
