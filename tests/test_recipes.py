"""The launch configurations, as accelerate reads them."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


@pytest.mark.parametrize(
    ("name", "kind", "version"), [("ddp", DistributedType.MULTI_GPU, None), ("fsdp2", DistributedType.FSDP, 2)]
)
def test_accelerate_reads_the_launch_configurations(name, kind, version):
    """Each is what its name says, leaves the precision to the training, and FSDP saves ordinary checkpoints."""
    config = load_config_from_file(str(RECIPES / f"{name}.yaml"))
    assert (config.distributed_type, config.mixed_precision) == (kind, "no")
    assert config.fsdp_config.get("fsdp_version") == version
    if version:
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"
