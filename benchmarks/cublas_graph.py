"""The base step on cuBLAS in a CUDA graph, by torch: what a GPU engine without XLA gets.

    python benchmarks/cublas_graph.py --tokens 8 64 --layers 32

Prints one JSON object a line: microseconds a layer of the step of `gpu_layers.layer`, its cheap
work compiled by torch (or as torch's own kernels, `--glue eager`), and of its four products alone.
Each with both layouts of the weights, `x @ w` and `x @ w.T`; the faster counts. A program of its
own, since JAX and torch would each take the GPU's memory: `measure` runs it before JAX starts.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shapes import MODELS, Shapes


def measure(model: str, tokens: list[int], layers: int, glue: str, python: str) -> dict[int, dict]:
    """Runs this file as a program: the records by tokens, none where torch has no CUDA.

    Raises:
        RuntimeError: It failed for another reason.
    """
    command = [python, str(Path(__file__)), "--model", model, "--layers", str(layers)]
    command += ["--glue", glue, "--tokens", *map(str, tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        print(f"cuBLAS not measured: {done.stderr.strip()}", flush=True)
        return {}
    if done.returncode:
        raise RuntimeError(f"cublas_graph.py must end well; it said {done.stderr[-2000:]}")
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {record["tokens"]: record for record in records}


def glue_functions(torch, kind: str) -> tuple[Callable, Callable, Callable]:
    """(residual, gate times up, residual and norm), each one kernel if compiled."""
    functional = torch.nn.functional

    def add(x, y):
        return x + y

    def gate(y):
        left, right = y.chunk(2, dim=1)
        return functional.silu(left) * right

    def norm(x, y):
        x = x + y
        mean = x.float().square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-5).to(x.dtype)

    functions = (add, gate, norm)
    if kind == "compiled":
        return tuple(torch.compile(f, dynamic=False) for f in functions)
    return functions


def steps(torch, shapes: Shapes, storage, x, glue) -> dict[str, Callable]:
    """The layers, and their products alone, in both layouts of the weights."""
    add, gate, norm = glue
    queries = torch.randn(x.shape[0], shapes.q, device=x.device, dtype=x.dtype)
    inner = torch.randn(x.shape[0], shapes.ffn, device=x.device, dtype=x.dtype)

    def views(layout):
        for layer in storage:
            sizes = {n: (d_in, sum(widths)) for n, (d_in, widths) in shapes.modules.items()}
            if layout == "x @ w":
                yield {n: layer[n].view(sizes[n]) for n in sizes}
            else:
                yield {n: layer[n].view(sizes[n][::-1]).t() for n in sizes}

    def whole(layout):
        y = x
        for w in views(layout):
            y = add(y, (y @ w["qkv"])[:, : shapes.q] @ w["o"])
            y = norm(y, gate(y @ w["gate_up"]) @ w["down"])
        return y

    def products(layout):
        inputs = {"qkv": x, "o": queries, "gate_up": x, "down": inner}
        return [inputs[n] @ w[n] for w in views(layout) for n in inputs]

    forms = {"layer": whole, "products": products}
    return {
        f"{name} {layout}": lambda form=form, layout=layout: form(layout)
        for name, form in forms.items()
        for layout in ("x @ w", "x @ w.T")
    }


def graph_us(torch, step: Callable, repeats: int = 9) -> float:
    """Median microseconds of a replay of the step's CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    del kept
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--glue", choices=("compiled", "eager"), default="compiled")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit(_missing("torch cannot be imported"))
    if not torch.cuda.is_available():
        sys.exit(_missing("torch sees no CUDA device"))
    shapes = MODELS[args.model]
    make = {"device": "cuda", "dtype": torch.bfloat16}
    storage = [
        {n: torch.randn(d * sum(w), **make) * 0.02 for n, (d, w) in shapes.modules.items()}
        for _ in range(args.layers)
    ]
    glue = glue_functions(torch, args.glue)
    with torch.inference_mode():
        for tokens in args.tokens:
            x = torch.randn(tokens, shapes.hidden, **make)
            found = {
                name: graph_us(torch, step) / args.layers
                for name, step in steps(torch, shapes, storage, x, glue).items()
            }
            least = {
                f"{kind}_us": min(us for name, us in found.items() if name.startswith(kind))
                for kind in ("layer", "products")
            }
            record = {"tokens": tokens, **least, "glue": args.glue, "forms_us": found}
            print(json.dumps(record | {"torch": torch.__version__}), flush=True)


def _missing(why: str) -> int:
    print(why, file=sys.stderr)
    return 3


if __name__ == "__main__":
    main()
