"""python -m bookends.bench: this package against torch, torch.compile and what else is installed, on your device.

One table: the time and the peak memory of forward and backward of the embedding, of the cross-entropy and of the LM
head with its loss, at one shape. Times are medians of runs that find the L2 cache overwritten. Memory is what a run
adds at its peak to the tensors that exist before it, gradients included. On the CPU device the times say nothing about
a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

import bookends
import bookends.torch

MODELS = {"gpt2": (768, 50257), "llama-3-8b": (4096, 128256), "llama-3.2-1b": (2048, 128256),
          "mistral-7b": (4096, 32768), "qwen2.5-7b": (3584, 152064), "gemma-2-2b": (2304, 256000), "tiny": (64, 1000)}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Job = Callable[..., Tensor]


def found(module: str, name: str) -> Optional[Any]:
    """A function or class of a package, or None if the package is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def optional(module: str, name: str, use: Callable[[Any], Job]) -> Optional[Job]:
    """use() of a function of a package, or None if the package is not installed."""
    function = found(module, name)
    return None if function is None else use(function)


def torch_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def torch_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def jobs(compiled: bool) -> dict[str, dict[str, Optional[Job]]]:
    """The implementations of each job; None: not installed. Their arguments are those of inputs()."""
    compile_ = torch.compile if compiled else lambda function: None
    ours = bookends.torch
    return {
        "embedding": {
            "bookends": lambda ids, weight: ours.embedding(ids, weight),
            "torch": F.embedding,
            "torch.compile": compile_(F.embedding),
        },
        "cross_entropy": {
            "bookends": lambda logits, target: ours.cross_entropy(logits, target),
            "bookends, in place": lambda logits, target: ours.cross_entropy(logits, target, inplace=True),
            "torch": torch_loss,
            "torch.compile": compile_(torch_loss),
            "Liger": optional("liger_kernel.transformers", "LigerCrossEntropyLoss",
                              lambda loss: lambda logits, target: loss()(logits, target)),
            "QuACK": optional("quack.cross_entropy", "cross_entropy",
                              lambda loss: lambda logits, target: loss(logits, target, reduction="mean")),
        },
        "linear_cross_entropy": {
            **{f"bookends, {memory}": lambda hidden, weight, target, memory=memory: ours.linear_cross_entropy(
                hidden, weight, target, memory=memory) for memory in ("10%", "25%")},
            "torch": torch_head,
            "torch.compile": compile_(torch_head),
            "Liger": optional("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss",
                              lambda loss: lambda hidden, weight, target: loss()(weight, hidden, target)),
            "QuACK": optional("quack.linear_cross_entropy", "chunked_linear_cross_entropy", lambda loss: loss),
            "CCE": optional("cut_cross_entropy", "linear_cross_entropy", lambda loss: loss),
        },
    }


def inputs(job: str, N: int, C: int, V: int, dtype: torch.dtype,
           device: str) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The arguments of a job, and the arguments with a gradient."""
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, V, (N,), device=device, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype).requires_grad_()

    if job == "embedding":
        weight = normal(V, C)
        return (ids, weight), [weight]
    if job == "cross_entropy":
        logits = normal(N, V)
        return (logits, ids), [logits]
    hidden, weight = normal(N, C), normal(V, C)
    with torch.no_grad():
        weight *= C**-0.5
    return (hidden, weight, ids), [hidden, weight]


class Device:
    """Times runs and measures their memory."""

    def __init__(self, name: str) -> None:
        self.name, self.is_gpu = name, name == "cuda"
        self.flushed = torch.empty(256 << 20, dtype=torch.uint8, device=name) if self.is_gpu else None

    def time(self, run: Callable[[], None]) -> float:
        """Milliseconds of one run."""
        if self.flushed is None:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        self.flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def peak(self, run: Callable[[], None]) -> Optional[float]:
        """MiB that a run adds at its peak; None on the CPU."""
        if not self.is_gpu:
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(function: Job, arguments: tuple[Tensor, ...], wanted: list[Tensor], device: Device,
            seconds: float) -> tuple[float, Optional[float], float]:
    """(milliseconds, MiB, loss) of forward and backward."""
    value: Optional[Tensor] = None

    def run() -> None:
        nonlocal value
        for tensor in wanted:
            tensor.grad = None
        output = function(*arguments)
        value = output.detach() if output.dim() == 0 else output.detach().float().mean()
        output.backward(torch.ones_like(output))

    run()  # compiles, makes plans
    assert value is not None
    loss = float(value)
    for tensor in wanted:
        tensor.grad = None
    memory = device.peak(run)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 100):
        times.append(device.time(run))
    return statistics.median(times), memory, loss


def line(name: str, result: tuple[float, Optional[float], float], expected: Optional[float]) -> str:
    """One implementation's line; expected: the loss of the first one."""
    milliseconds, memory, loss = result
    text = f"  {name:22} {milliseconds:10.3f} ms"
    text += "" if memory is None else f" {memory:10.1f} MiB"
    if expected is not None and not abs(loss - expected) <= 0.02 * abs(expected) + 0.02:
        text += f"   its result differs: {loss:.4f}, not {expected:.4f}"
    return text


def main(arguments: Optional[list[str]] = None) -> None:
    device = bookends.show_config()["device"]
    on_gpu = device == "cuda"
    parser = argparse.ArgumentParser(prog="python -m bookends.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b" if on_gpu else "tiny", help="C and V")
    parser.add_argument("-c", type=int, help="channels, instead of the model's")
    parser.add_argument("-v", type=int, help="vocabulary, instead of the model's")
    parser.add_argument("-n", type=int, default=8192 if on_gpu else 64, help="rows (tokens); default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each implementation; default %(default)s")
    parser.add_argument("--no-compile", action="store_true", help="leaves out torch.compile")
    given = parser.parse_args(arguments)
    C, V = MODELS[given.model]
    C, V, N = C if given.c is None else given.c, V if given.v is None else given.v, given.n
    if min(C, V, N) < 1:
        parser.error(f"-c, -v and -n: expected numbers from 1 on, given {C}, {V} and {N}")
    print(f"\n{torch.cuda.get_device_name() if on_gpu else 'CPU device'}: forward and backward, N={N} C={C} V={V} "
          f"{given.dtype}, torch {torch.__version__}")
    timer = Device(device)
    for job, implementations in jobs(not given.no_compile).items():
        print(f"{job}")
        expected: Optional[float] = None
        for name, function in implementations.items():
            if function is None:
                continue
            tensors, wanted = inputs(job, N, C, V, DTYPES[given.dtype], device)
            try:
                result = measure(function, tensors, wanted, timer, given.seconds)
            except Exception as error:  # of another package, or too little memory
                print(f"  {name:22} {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}")
                continue
            print(line(name, result, expected), flush=True)
            expected = result[2] if expected is None else expected
        missing = [name for name, function in implementations.items() if function is None and name != "torch.compile"]
        if missing:
            print(f"  not installed: {', '.join(missing)}")


if __name__ == "__main__":
    main()
