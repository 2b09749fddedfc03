#!/usr/bin/env python3
"""Times this library and its peers in one process, on equal inputs, and compares their outputs.

usage: dev/bench/peers.py [JOB...] [--json FILE] [--seconds S] [--list]

A job is one operation at one shape. In each job every implementation computes the same outputs from the same inputs.
The outputs must agree with a reference, computed by torch in float32 or float64, within the job's tolerance: the
largest difference as a share of the reference's largest magnitude. An implementation that disagrees is marked and not
timed. Peers that are not installed are skipped by name.

Times are medians. "cold": before each run the persisting lines of the L2 cache are reset and the cache is overwritten
(kernels of torch.compile load with evict_last, and such lines survive an overwrite). "hot": replays of a CUDA graph of
ten calls on the same inputs. "MiB" is what a run adds at its peak to the tensors that exist before it. "% of copy" is
the fewest bytes that the job must move, over the time, as a share of a device-to-device copy in the same process.

Requires a GPU, torch and the Python package: pip install ./python, or PYTHONPATH=python with BOOKENDS_LIBRARY set. Other
peers: pip install -r dev/bench/requirements.txt. Exit status: 0; 1 an output of this library differs; 2 a bad argument;
3 no GPU, or no torch.
"""
import argparse
import ctypes
import importlib
import importlib.metadata
import json
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    import bookends
    import bookends.torch
except ImportError as error:
    print(f"peers.py: {error} (pip install torch ./python)", file=sys.stderr)
    sys.exit(3)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Peer:
    """One implementation of a job: run() computes, outputs(run()) are the tensors that are compared with the
    reference, and prepare() restores what run() changes in place."""

    def __init__(self, name, run, outputs=lambda result: [result], prepare=lambda: None):
        self.name, self.run, self.outputs, self.prepare = name, run, outputs, prepare


class Job:
    """The implementations (None: not installed), the reference outputs, the tolerance, the fewest bytes (or None)."""

    def __init__(self, peers, reference, tolerance, moved=None, hot=False):
        self.peers = [peer for peer in peers if isinstance(peer, Peer)]
        self.missing = [peer for peer in peers if isinstance(peer, str)]
        self.reference, self.tolerance, self.moved, self.hot = reference, tolerance, moved, hot


def optional(name, module, attribute, make):
    """make(function) as a Peer called `name`, or the name alone if the package cannot be imported."""
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception:  # an installed package may fail to import, in any way
        return name
    return make(name, function)


# ---------------------------------------------------------------------------------------------------------------------
# inputs

class Inputs:
    """Random tensors from one seed."""

    def __init__(self):
        self.generator = torch.Generator("cuda").manual_seed(1)

    def ids(self, tokens, count, V):
        """Uniform ids, or Zipf's law (the frequency of rank r is proportional to 1/r) with shuffled ranks."""
        if tokens == "uniform":
            return torch.randint(0, V, (count,), device="cuda", generator=self.generator, dtype=torch.int32)
        sums = torch.cumsum(1 / torch.arange(1, V + 1, device="cuda", dtype=FP64), 0)
        points = torch.rand(count, device="cuda", dtype=FP64, generator=self.generator) * sums[-1]
        ranks = torch.searchsorted(sums, points).clamp_(max=V - 1)
        return torch.randperm(V, device="cuda", generator=self.generator)[ranks].int()

    def normal(self, *shape, dtype):
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=self.generator)


def distinct(ids):
    return int(torch.unique(ids).numel())


# ---------------------------------------------------------------------------------------------------------------------
# jobs: each function takes a shape and returns a Job

def gather(N, C, V, dtype, tokens, hot=False):
    inputs = Inputs()
    ids, table = inputs.ids(tokens, N, V), inputs.normal(V, C, dtype=dtype)
    out = torch.empty(N, C, device="cuda", dtype=dtype)
    compiled = torch.compile(lambda i, w: F.embedding(i, w))
    return Job([Peer("bookends", lambda: bookends.embedding_lookup(ids, table, out=out)),
                Peer("torch", lambda: F.embedding(ids, table)),
                Peer("torch.compile", lambda: compiled(ids, table))],
               lambda: [table[ids.long()].to(FP64)], 0,
               (distinct(ids) + N) * C * table.element_size() + 4 * N, hot)


def bag(bags, hotness, C, V, dtype, tokens):
    inputs = Inputs()
    ids, table = inputs.ids(tokens, bags * hotness, V).view(bags, hotness), inputs.normal(V, C, dtype=dtype)
    out = torch.empty(bags, C, device="cuda", dtype=dtype)

    def reference():
        total = torch.zeros(bags, C, device="cuda", dtype=FP32)
        for k in range(hotness):
            total += table[ids[:, k].long()].float()
        return [total]
    return Job([Peer("bookends", lambda: bookends.embedding_bag(ids, table, out=out)),
                Peer("torch", lambda: F.embedding_bag(ids, table, mode="sum"))],
               reference, 2**-10, (distinct(ids) + bags) * C * table.element_size() + 4 * ids.numel())


def bag_gradient(bags, hotness, C, V, tokens):
    """Sparse, from fp16 to fp32. torch's gradient is fp16, and coalesce() sums the equal indices."""
    inputs = Inputs()
    ids = inputs.ids(tokens, bags * hotness, V).view(bags, hotness)
    dout = inputs.normal(bags, C, dtype=FP16)
    weight = torch.zeros(V, C, device="cuda", dtype=FP16, requires_grad=True)
    loss = F.embedding_bag(ids, weight, mode="sum", sparse=True)
    rows = torch.unique(ids)
    size = bookends.embedding_bag_backward_workspace_bytes(ids.numel(), bags, C, V)
    workspace = torch.empty(size, device="cuda", dtype=torch.uint8)

    def reference():
        sums = torch.zeros(rows.numel(), C, device="cuda", dtype=FP64)
        sums.index_add_(0, torch.searchsorted(rows, ids.flatten()), dout.double().repeat_interleave(hotness, 0))
        return [sums, rows.double()]
    return Job([Peer("bookends", lambda: bookends.embedding_bag_backward(
                         dout, ids, dtable=True, rows=V, sparse=True, grad_dtype=FP32, workspace=workspace),
                     lambda result: [result.dtable[:rows.numel()], result.indices[:rows.numel()]]),
                Peer("torch, coalesce()",
                     lambda: torch.autograd.grad(loss, weight, dout, retain_graph=True)[0].coalesce(),
                     lambda gradient: [gradient.values(), gradient.indices()[0]])],
               reference, 2**-9, rows.numel() * (C * 4 + 8) + bags * C * 2 + 4 * ids.numel())


def accumulate(N, C, V, tokens):
    inputs = Inputs()
    ids, before, values = inputs.ids(tokens, N, V), inputs.normal(V, C, dtype=FP32), inputs.normal(N, C, dtype=FP32)
    table, long_ids = before.clone(), ids.long()
    workspace = torch.empty(bookends.embedding_update_workspace_bytes(N, C, V, mode="accumulate"), device="cuda",
                            dtype=torch.uint8)
    restore = lambda: table.copy_(before)  # noqa: E731
    return Job([Peer("bookends", lambda: bookends.embedding_update(table, ids, values, mode="accumulate",
                                                                   workspace=workspace), prepare=restore),
                Peer("torch index_add_", lambda: table.index_add_(0, long_ids, values), prepare=restore)],
               lambda: [before.double().index_add_(0, long_ids, values.double())], 1e-5,
               (2 * distinct(ids) + N) * C * 4 + 4 * N)


def overwrite(N, C, V, tokens):
    """Distinct indices: torch promises no order for repeated ones."""
    inputs = Inputs()
    ids = torch.unique(inputs.ids(tokens, N, V))
    ids = ids[torch.randperm(ids.numel(), device="cuda", generator=inputs.generator)]
    N = ids.numel()
    before, values = inputs.normal(V, C, dtype=FP32), inputs.normal(N, C, dtype=FP32)
    table, long_ids = before.clone(), ids.long()
    workspace = torch.empty(bookends.embedding_update_workspace_bytes(N, C, V), device="cuda", dtype=torch.uint8)
    restore = lambda: table.copy_(before)  # noqa: E731
    return Job([Peer("bookends, distinct=True", lambda: bookends.embedding_update(table, ids, values, distinct=True),
                     prepare=restore),
                Peer("bookends", lambda: bookends.embedding_update(table, ids, values, workspace=workspace),
                     prepare=restore),
                Peer("torch index_copy_", lambda: table.index_copy_(0, long_ids, values), prepare=restore)],
               lambda: [before.index_copy(0, long_ids, values)], 0, 2 * N * C * 4 + 4 * N)


def encoder(B, T, C, V, tokens):
    """Forward: wte[inp] + wpe."""
    inputs = Inputs()
    inp = inputs.ids(tokens, B * T, V).view(B, T)
    wte, wpe = inputs.normal(V, C, dtype=BF16), inputs.normal(T, C, dtype=BF16)
    out = torch.empty(B, T, C, device="cuda", dtype=BF16)
    eager = lambda: F.embedding(inp, wte) + wpe  # noqa: E731
    compiled = torch.compile(lambda i, w, p: F.embedding(i, w) + p)
    return Job([Peer("bookends", lambda: bookends.encoder_forward(inp, wte, wpe, out=out)),
                Peer("torch", eager), Peer("torch.compile", lambda: compiled(inp, wte, wpe))],
               lambda: [wte[inp.long()].float() + wpe.float()], 2**-8,
               (distinct(inp) + T + B * T) * C * 2 + 4 * B * T)


def encoder_gradient(B, T, C, V, tokens):
    """dwte and dwpe, written: torch's autograd writes new gradients."""
    inputs = Inputs()
    inp, dout = inputs.ids(tokens, B * T, V).view(B, T), inputs.normal(B, T, C, dtype=BF16)
    wte = torch.zeros(V, C, device="cuda", dtype=BF16, requires_grad=True)
    wpe = torch.zeros(T, C, device="cuda", dtype=BF16, requires_grad=True)
    loss = F.embedding(inp, wte) + wpe
    compiled = torch.compile(lambda i, w, p: F.embedding(i, w) + p)(inp, wte, wpe)
    dwte, dwpe = torch.empty_like(wte), torch.empty_like(wpe)
    workspace = torch.empty(bookends.encoder_backward_workspace_bytes(B, T, C, V), device="cuda", dtype=torch.uint8)
    autograd = lambda output: lambda: torch.autograd.grad(output, (wte, wpe), dout, retain_graph=True)  # noqa: E731

    def reference():
        flat = dout.view(-1, C).double()
        return [torch.zeros(V, C, device="cuda", dtype=FP64).index_add_(0, inp.flatten(), flat), dout.double().sum(0)]
    return Job([Peer("bookends", lambda: bookends.encoder_backward(dout, inp, dwte, dwpe, overwrite=True,
                                                                   workspace=workspace), list),
                Peer("torch", autograd(loss), list), Peer("torch.compile", autograd(compiled), list)],
               reference, 2**-7, (V + T + B * T) * C * 2 + 4 * B * T)


def softmax_inputs(N, V):
    inputs = Inputs()
    return inputs.normal(N, V, dtype=BF16), inputs.ids("uniform", N, V)


def cross_entropy(N, V):
    """Losses and the gradient of their mean."""
    logits, targets = softmax_inputs(N, V)
    leaf, long_targets = logits.clone().requires_grad_(), targets.long()
    dlogits = torch.empty_like(logits)
    losses = torch.empty(N, device="cuda", dtype=FP32)

    def autograd(function):
        def run():
            loss = function(leaf)
            return [loss.detach(), torch.autograd.grad(loss, leaf)[0]]
        return run
    eager = lambda x: F.cross_entropy(x.float(), long_targets)  # noqa: E731
    compiled = torch.compile(eager)

    def reference():
        x = logits.float().requires_grad_()
        loss = F.cross_entropy(x, long_targets)
        return [loss.detach(), torch.autograd.grad(loss, x)[0]]
    return Job([Peer("bookends", lambda: bookends.classifier_fused(logits, targets, losses=losses, dlogits=dlogits,
                                                                   dloss=1 / N),
                     lambda result: [losses.mean(), dlogits]),
                Peer("torch", autograd(eager), list), Peer("torch.compile", autograd(compiled), list),
                optional("Liger", "liger_kernel.transformers", "LigerCrossEntropyLoss", lambda name, loss: Peer(
                    name, autograd(lambda x: loss()(x, long_targets)), list,
                    prepare=lambda: leaf.data.copy_(logits))),  # Liger writes the gradient over the logits
                optional("QuACK", "quack.cross_entropy", "cross_entropy", lambda name, loss: Peer(
                    name, autograd(lambda x: loss(x, long_targets, reduction="mean")), list))],
               reference, 2**-7, 2 * N * V * 2 + 4 * N)


def head(N, C, V):
    """The mean loss of the LM head, with the gradients of hidden and weight."""
    inputs = Inputs()
    hidden = inputs.normal(N, C, dtype=BF16).requires_grad_()
    weight = (inputs.normal(V, C, dtype=BF16) * C**-0.5).requires_grad_()
    targets = inputs.ids("uniform", N, V).long()

    def autograd(function):
        def run():
            loss = function(hidden, weight)
            return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
        return run
    eager = lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets)  # noqa: E731
    compiled = torch.compile(eager)

    def reference():
        x, w = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
        loss = F.cross_entropy(F.linear(x, w), targets)
        return [loss.detach(), *torch.autograd.grad(loss, (x, w))]
    ours = [Peer(f"bookends, memory={memory}", autograd(lambda x, w, memory=memory: bookends.torch.linear_cross_entropy(
        x, w, targets, memory=memory)), list) for memory in ("10%", "25%")]
    return Job([*ours, Peer("torch", autograd(eager), list), Peer("torch.compile", autograd(compiled), list),
                optional("Liger", "liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss",
                         lambda name, loss: Peer(name, autograd(lambda x, w: loss()(w, x, targets)), list)),
                optional("QuACK", "quack.linear_cross_entropy", "chunked_linear_cross_entropy",
                         lambda name, loss: Peer(name, autograd(lambda x, w: loss(x, w, targets)), list)),
                optional("CCE", "cut_cross_entropy", "linear_cross_entropy",
                         lambda name, loss: Peer(name, autograd(lambda x, w: loss(x, w, targets)), list))],
               reference, 2**-6)


JOBS = {}
for _tokens in ("uniform", "zipf"):
    for _C, _V in ((768, 50257), (4096, 128256)):
        JOBS[f"gather N65536 C{_C} V{_V} bf16 {_tokens}"] = (gather, 65536, _C, _V, BF16, _tokens)
for _dtype in (FP32, FP16):
    for _N in (2048, 4096):
        for _C in (512, 1024):
            JOBS[f"gather N{_N} C{_C} V1024 {'fp32' if _dtype is FP32 else 'fp16'} hot"] = (
                gather, _N, _C, 1024, _dtype, "uniform", True)
JOBS.update({
    "bag sum of 64 B65536 C256 V10M fp16 uniform": (bag, 65536, 64, 256, 10_000_000, FP16, "uniform"),
    "bag sum of 32 B65536 C128 V1M fp16 uniform": (bag, 65536, 32, 128, 1_000_000, FP16, "uniform"),
    "bag sum of 32 B65536 C128 V1M fp16 zipf": (bag, 65536, 32, 128, 1_000_000, FP16, "zipf"),
    "bag gradient, sparse, of 32 B8192 C128 V10M zipf": (bag_gradient, 8192, 32, 128, 10_000_000, "zipf"),
    "accumulate N65536 C256 V100k fp32 zipf": (accumulate, 65536, 256, 100_000, "zipf"),
    "overwrite N65536 C256 V10M fp32 distinct": (overwrite, 65536, 256, 10_000_000, "uniform"),
    "encoder forward B64 T1024 C768 V50257 uniform": (encoder, 64, 1024, 768, 50257, "uniform"),
    "encoder forward B64 T1024 C768 V50257 zipf": (encoder, 64, 1024, 768, 50257, "zipf"),
    "encoder backward B64 T1024 C768 V50257 uniform": (encoder_gradient, 64, 1024, 768, 50257, "uniform"),
    "encoder backward B64 T1024 C768 V50257 zipf": (encoder_gradient, 64, 1024, 768, 50257, "zipf"),
    "cross-entropy N8192 V50304": (cross_entropy, 8192, 50304),
    "cross-entropy N4096 V128256": (cross_entropy, 4096, 128256),
    "LM head N8192 C768 V50304": (head, 8192, 768, 50304),
    "LM head N8192 C2048 V128256": (head, 8192, 2048, 128256),
})


# ---------------------------------------------------------------------------------------------------------------------
# measurement

class Timer:
    """Times runs, cold or as a graph, and measures their memory and the copy rate."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.driver = ctypes.CDLL("libcuda.so.1")

    def repeat(self, before, run):
        """The median time in milliseconds of run(), each after before()."""
        times, end = [], time.perf_counter() + self.seconds
        while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
            before()
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        return statistics.median(times)

    def cold(self, peer):
        def before():
            peer.prepare()
            torch.cuda.synchronize()
            if self.driver.cuCtxResetPersistingL2Cache() != 0:
                raise RuntimeError("cuCtxResetPersistingL2Cache failed")
            self.flushed.zero_()
        return self.repeat(before, peer.run)

    def hot(self, peer, calls=10):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                peer.run()
        return self.repeat(lambda: None, graph.replay) / calls

    def copy_rate(self):
        """Bytes read and written per second by a device-to-device copy."""
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.numel() / (self.repeat(lambda: None, lambda: target.copy_(source)) * 1e-3)


def peak(peer):
    """MiB that a run adds at its peak."""
    peer.prepare()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    peer.run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def difference(outputs, reference):
    """The largest difference, as a share of the reference's largest magnitude; NaN counts as infinite."""
    worst = 0.0
    for got, want in zip(outputs, reference):
        if got.shape != want.shape:
            return float("inf")
        share = ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()
        worst = max(worst, share) if share == share else float("inf")
    return worst


def measure(job, peer, reference, timer):
    """The record of one implementation: its time and memory, or why there are none."""
    record = {"peer": peer.name}
    try:
        peer.run()  # compiles
        peer.prepare()
        record["difference"] = difference(peer.outputs(peer.run()), reference)
        if not record["difference"] <= job.tolerance:
            return {**record, "error": f"differs by {record['difference']:.2g} (allowed {job.tolerance:.2g})"}
        record["peak_mib"] = round(peak(peer), 2)
        record["time_ms"] = timer.hot(peer) if job.hot else timer.cold(peer)
    except Exception as error:  # of another package, or too little memory
        return {**record, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"}
    return record


def versions():
    names = {"torch": "torch", "Liger": "liger-kernel", "QuACK": "quack-kernels", "CCE": "cut-cross-entropy"}
    found = {"bookends": bookends.version()}
    for name, package in names.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def main():
    parser = argparse.ArgumentParser(prog="peers.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="jobs whose names contain one of these; default: all")
    parser.add_argument("--json", metavar="FILE", help="appends one JSON object per job and implementation")
    parser.add_argument("--seconds", type=float, default=0.5, help="per implementation; default %(default)s")
    parser.add_argument("--list", action="store_true", help="prints the names of the jobs")
    given = parser.parse_args()
    chosen = {name: job for name, job in JOBS.items() if not given.jobs or any(word in name for word in given.jobs)}
    for word in given.jobs:
        if not any(word in name for name in JOBS):
            parser.error(f"JOB: no job's name contains '{word}' (--list)")
    if given.list:
        print("\n".join(chosen))
        return 0
    if not torch.cuda.is_available() or bookends.show_config()["device"] != "cuda":
        print("peers.py: needs a GPU, and a library built for it", file=sys.stderr)
        return 3
    timer = Timer(given.seconds)
    copy_rate = timer.copy_rate()
    common = {"device": torch.cuda.get_device_name(), "commit": bookends.show_config()["commit"],
              "copy_gbps": round(copy_rate * 1e-9, 1), "versions": versions()}
    print(f"{common['device']}, copy {common['copy_gbps']:.0f} GB/s, "
          + ", ".join(f"{name} {number}" for name, number in common["versions"].items()))
    wrong = False
    for name, (make, *shape) in chosen.items():
        job = make(*shape)
        reference = job.reference()
        print(f"\n{name} ({'hot' if job.hot else 'cold'})", flush=True)
        first = None
        for peer in job.peers:
            record = measure(job, peer, reference, timer)
            if "error" in record:
                text = record["error"]
                wrong = wrong or peer.name.startswith("bookends")
            else:
                first = first or record["time_ms"]
                text = f"{record['time_ms']:9.4f} ms {record['peak_mib']:9.1f} MiB {record['time_ms'] / first:7.2f}x"
                if job.moved:
                    record["pct_of_copy"] = 100 * job.moved / (record["time_ms"] * 1e-3) / copy_rate
                    text += f" {record['pct_of_copy']:6.1f}% of copy"
            print(f"  {peer.name:26} {text}", flush=True)
            if given.json:
                cache = "hot" if job.hot else "cold"
                with open(given.json, "a") as file:
                    file.write(json.dumps({"job": name, "cache": cache, **common, **record}) + "\n")
        if job.missing:
            print(f"  not installed: {', '.join(job.missing)}")
        del job, reference
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
