"""``sparsebalance evaluate``: loss of a model on documents, one by one, with any attention and budget."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from hf_sparsebalance.attention import ATTENTION_NAME
from hf_sparsebalance.cli.models import load_model, load_tokenizer
from hf_sparsebalance.cli.parsing import Parser
from hf_sparsebalance.documents import load_documents
from hf_sparsebalance.errors import UserError
from hf_sparsebalance.heldout import heldout_loss


def run(arguments: Sequence[str]) -> None:
    """Print the token-weighted loss, and what the sparse attention kept."""
    parser = Parser(prog="sparsebalance evaluate", description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="model folder or hub name")
    parser.add_argument("--data", required=True, nargs="+", help="documents, as for sparsebalance train")
    parser.add_argument("--attn_implementation", default=ATTENTION_NAME, help="default: %(default)s")
    parser.add_argument("--top_p", type=float, default=None, help="budget (default: the model's own)")
    parser.add_argument("--max_length", type=int, default=32768, help="longer documents are truncated, tokens")
    parser.add_argument("--text_column", default="text", help="column that holds the text")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    if args.top_p is not None and not 0.0 < args.top_p <= 1.0:
        raise UserError(f"--top_p must lie in (0, 1], got {args.top_p}")
    tokenizer = load_tokenizer(args.model_name_or_path)
    model = load_model(args.model_name_or_path, args.attn_implementation, "auto")
    documents, _ = load_documents(
        args.data, tokenizer=tokenizer, max_length=args.max_length, text_column=args.text_column
    )
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    result = heldout_loss(model.to(device), documents["input_ids"], args.top_p)
    if args.json:
        print(json.dumps(result))
    else:
        print("  ".join(f"{name} {value:.4f}" for name, value in result.items() if value is not None))
