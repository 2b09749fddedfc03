#!/usr/bin/env python3
"""Trains a small GPT twice, with torch's embedding and loss and with this package's, and plots loss, time and, on a
GPU, memory.

    python3 python/examples/train_gpt.py                       # bytes of the files of dev/data; a table
    python3 python/examples/train_gpt.py -o train_gpt.png      # and a plot (needs matplotlib)
    python3 python/examples/train_gpt.py -v 50257 -b 32 -t 1024 --dtype bf16     # on a GPU

Both runs start from the same weights and see the same batches. Embedding and LM head share their weights.
"""

import argparse
import pathlib
import time

import torch
import torch.nn.functional as F

import bookends
import bookends.torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Block(torch.nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(C), torch.nn.LayerNorm(C)
        self.qkv, self.out = torch.nn.Linear(C, 3 * C), torch.nn.Linear(C, C)
        self.up, self.down = torch.nn.Linear(C, 4 * C), torch.nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    def __init__(self, V, T, C, layers, heads, ours):
        super().__init__()
        self.ours = ours
        self.wte = torch.nn.Parameter(torch.randn(V, C) * 0.02)
        self.wpe = torch.nn.Parameter(torch.randn(T, C) * 0.02)
        self.blocks = torch.nn.Sequential(*[Block(C, heads) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(C)

    def forward(self, ids, targets):
        if self.ours:
            hidden = self.norm(self.blocks(bookends.torch.embedding(ids, self.wte, self.wpe)))
            return bookends.torch.linear_cross_entropy(hidden, self.wte, targets)
        hidden = self.norm(self.blocks(F.embedding(ids, self.wte) + self.wpe[:ids.shape[1]]))
        return F.cross_entropy(F.linear(hidden, self.wte).flatten(0, 1).float(), targets.flatten())


def train(ours, text, given, device):
    """(losses, milliseconds of each step, peak MiB or None)."""
    torch.manual_seed(1)
    model = GPT(given.v, given.t, given.c, given.layers, given.heads, ours).to(device, DTYPES[given.dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    generator = torch.Generator().manual_seed(2)
    losses, times = [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(given.steps):
        first = torch.randint(0, len(text) - given.t - 1, (given.b,), generator=generator)
        rows = torch.stack([text[i:i + given.t + 1] for i in first]).to(device)
        start = time.perf_counter()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        times.append((time.perf_counter() - start) * 1e3)
    return losses, times, torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None


def plot(results, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    memory = {name: peak for name, (_, _, peak) in results.items() if peak is not None}
    figure, panels = plt.subplots(1, 3 if memory else 2, figsize=(12, 4))
    for name, (losses, times, _) in results.items():
        panels[0].plot(losses, label=name)
        panels[1].plot(times[1:], label=name)
    panels[0].set(xlabel="step", ylabel="loss")
    panels[1].set(xlabel="step", ylabel="ms a step")
    if memory:
        panels[2].bar(list(memory), list(memory.values()))
        panels[2].set(ylabel="peak MiB")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("-b", 4), ("-t", 32), ("-c", 64), ("-v", 256), ("--layers", 2), ("--heads", 4),
                        ("--steps", 30)):
        parser.add_argument(name, type=int, default=value, help="default %(default)s")
    parser.add_argument("--lr", type=float, default=3e-3, help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("-o", metavar="PNG", help="where to plot to")
    given = parser.parse_args()
    if given.v < 256 or given.t < 1 or given.b < 1 or given.steps < 1:
        parser.error("-v must be 256 or more (the text is bytes), -t, -b and --steps 1 or more")
    data = pathlib.Path(__file__).resolve().parents[2] / "dev" / "data"
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sorted(data.glob("*.md")))),
                            dtype=torch.uint8).long()
    device = bookends.show_config()["device"]
    results = {name: train(ours, text, given, device) for name, ours in (("torch", False), ("bookends", True))}
    print("\nstep " + " ".join(f"{name:>12}" for name in results))
    for step in range(0, given.steps, max(1, given.steps // 10)):
        print(f"{step:4} " + " ".join(f"{losses[step]:12.4f}" for losses, _, _ in results.values()))
    for name, (losses, times, memory) in results.items():
        median = sorted(times)[len(times) // 2]
        print(f"{name}: last loss {losses[-1]:.4f}, {median:.2f} ms a step"
              + (f", peak {memory:.0f} MiB" if memory is not None else ""))
    if given.o:
        plot(results, given.o)


if __name__ == "__main__":
    main()
