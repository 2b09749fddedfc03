"""The records of dev/results and of the programs' --json: files, shapes, best block sizes, ladders."""
import json
import os
import typing

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "dev", "results")


class Ladder(typing.NamedTuple):
    """A table of versions, NAME_versions in KERNEL.cu, and the shape that its ladder and the summary show."""
    name: str
    kernel: str
    shape: str


LADDERS = [
    Ladder("encoder_forward", "encoder_forward", "B64 T1024 C768 V50257 bf16 uniform"),
    Ladder("encoder_backward", "encoder_backward", "B64 T1024 C768 V50257 bf16 zipf"),
    Ladder("embedding_lookup", "embedding_lookup", "B64 T1024 C768 V50257 bf16 uniform"),
    Ladder("embedding_bag", "embedding_lookup", "B64 T1024 C128 V1000000 fp16 uniform bag=sum hotness=32"),
    Ladder("embedding_bag_backward", "embedding_lookup_backward",
           "B8 T1024 C128 V10000000 fp16 zipf grad_dtype=fp32 hotness=32 sparse"),
    Ladder("embedding_overwrite", "embedding_update", "B64 T1024 C256 V10000000 fp32 uniform"),
    Ladder("embedding_accumulate", "embedding_update", "B64 T1024 C256 V100000 fp32 zipf op=accumulate"),
    Ladder("embedding_optimizer", "embedding_update", "B64 T1024 C256 V10000000 fp32 uniform op=rowwise-adagrad"),
    Ladder("classifier_fused", "classifier_fused", "B8 T1024 V50257 P50304 bf16 uniform"),
    Ladder("lm_head", "lm_head", "B8 T1024 C2048 V128256 bf16 uniform"),
]
KERNELS = list(dict.fromkeys(ladder.kernel for ladder in LADDERS))

# The options that only some kernels have, and their defaults.
DEFAULTS = {"no_positions": False, "grad_dtype": "same", "overwrite": False, "rounding": "nearest",
            "bag": "concat", "out_dtype": "same", "index": "int32", "weights": False, "stride": 0, "padding_idx": -1,
            "tables": 1, "hotness": "1", "sparse": False, "dweights": False, "op": "overwrite", "value_dtype": "same",
            "distinct": False, "scale": 1, "weight_decay": 0, "logits": "gaussian", "output": "in-place", "probs": False,
            "lse": False, "accuracy": False, "label_smoothing": 0, "z_loss": 0, "softcap": 0, "logit_scale": 1,
            "ignore_every": 0, "gradients": "both", "forward": False, "bias": False, "tf32": False, "memory": "25%",
            "sweep": "none", "graph": False, "finite": False, "spread": 2}
OWN_DEFAULTS = {"lm_head": {"grad_dtype": "fp32"}, "embedding_lookup_backward": {"bag": "sum", "hotness": None}}


def shape(record):
    """The dimensions and types of a record, and its other options that are not at their defaults."""
    parts = [f"{key}{record[key]}" for key in "BTCVP" if record[key] is not None]
    parts += [record["dtype"], record["tokens"]]
    for key, default in {**DEFAULTS, **OWN_DEFAULTS.get(record["kernel"], {})}.items():
        value = record.get(key, default)
        if value != default:
            parts.append(key if value is True else f"{key}={value}")
    return " ".join(parts)


def read(path):
    """The records of a file, one JSON object per line."""
    with open(path) as file:
        return [json.loads(line) for line in file]


def best_by_shape(records):
    """The record of the best block size, by shape and version number."""
    best = {}
    for record in records:
        if record.get("best"):
            best.setdefault(shape(record), {})[record["version"]] = record
    return best


def share_of_ceiling(record):
    """The percentage of the fastest possible rate and the name of that rate: the copy rate, or that of the bare matrix
    products. None where it was not measured."""
    for key, ratio in record.items():
        if key.startswith("ratio_to_"):
            return (100 / ratio if ratio else None), key[len("ratio_to_"):]
    return record["pct_of_copy"], "copy"
