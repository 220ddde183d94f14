"""Products of few rows on a GPU: tilings of `kernels/products/few_rows.py` beside cuBLAS, alone and in a layer.

    PYTHONPATH=tests python -m benchmarks.kernels.few_rows --compile-only 0/8   # and 1/8 … 7/8, at the same time
    PYTHONPATH=tests python -m benchmarks.kernels.few_rows --forms bf16 --json few_rows.json
    PYTHONPATH=tests python -m benchmarks.kernels.few_rows --engine             # layers alone, as engines choose

Checks every tiling against the product of float32 numbers in odd sizes first. Weights come in enough copies that none
is found in the L2 cache; each figure is of one product within a CUDA graph. A tiling is written
BLOCK_N x bytes of BLOCK_K x stages, warps, parts; with another BLOCK_M than the rows need, that too.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.sweep import BANDWIDTH, num_copies
from benchmarks.records import write_json
from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows, quantize
from proa_engine.kernels.launch import HOPPER_MULTIPROCESSORS, INTERPRETED, cdiv, next_power_of_2
from proa_engine.kernels.products.few_rows import Tiling, few_rows_linear, few_rows_tiling
from proa_engine.kernels.rms_norm import add_rms_norm, rms_norm_fp8
from proa_engine.kernels.silu_and_mul import silu_and_mul, silu_and_mul_fp8
from proa_engine.kernels.tilings import TILINGS
from proa_engine.kernels.variants import Variant, compile_launcher, record

SHARED_BYTES = 227 * 1024  # of a program
ROWS = Fp8Form()
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter computes bfloat16 wrongly
WARM_SECONDS = 3e-3  # of a timing


@dataclass(frozen=True, slots=True)
class Shape:
    model: str
    name: str
    outputs: int
    inputs: int

    def num_bytes(self, form: str) -> int:
        return (1 if form == "fp8" else 2) * self.outputs * self.inputs


def _layer(model: str, **sizes: tuple[int, int]) -> list[Shape]:
    return [Shape(model, name, *size) for name, size in sizes.items()]


LAYERS = {
    "8B": _layer("8B", qkv=(6144, 4096), o=(4096, 4096), gate_up=(28672, 4096), down=(4096, 14336)),
    "0.6B": _layer("0.6B", qkv=(4096, 1024), o=(1024, 2048), gate_up=(6144, 1024), down=(1024, 3072)),
    "30B": _layer("30B", qkv=(5120, 2048), o=(2048, 4096)),
}
HEADS = [Shape("8B", "head", 128256, 4096), Shape("0.6B", "head", 151936, 1024)]
ODD = Shape("odd", "odd", 528, 2064)
TINY = _layer("tiny", qkv=(80, 48), o=(48, 80), gate_up=(160, 48), down=(48, 80))


@dataclass(frozen=True, slots=True)
class Tile:
    block_n: int
    row_bytes: int  # of BLOCK_K
    num_stages: int
    num_warps: int
    block_m: int = 0  # 0: as the rows need, at most 128

    def shared_bytes(self, block_m: int) -> int:
        return self.num_stages * (self.block_n + block_m) * self.row_bytes

    def fits(self, block_m: int) -> bool:
        return self.shared_bytes(block_m) <= SHARED_BYTES and self.sums(block_m) <= 128

    def sums(self, block_m: int) -> int:
        """Registers of a thread for sums."""
        return self.block_n * block_m // (32 * self.num_warps)

    def programs(self, block_m: int) -> int:
        """That a multiprocessor runs at once."""
        registers = (self.sums(block_m) + 72) * 32 * self.num_warps
        return max(min((SHARED_BYTES + 1024) // (self.shared_bytes(block_m) + 1024), 65536 // registers, 4), 1)


TILES = (
    Tile(64, 128, 8, 4),
    Tile(64, 256, 4, 4),
    Tile(64, 512, 3, 4),
    Tile(128, 128, 4, 4),
    Tile(128, 128, 6, 4),
    Tile(128, 256, 3, 8),
    Tile(256, 128, 4, 8),
)
WIDE_TILES = (Tile(64, 128, 4, 4, 256), Tile(128, 128, 4, 8, 256))  # of more than 128 rows


def tilings(shape: Shape, form: str, num_rows: int) -> dict[str, Tiling]:
    found: dict[str, Tiling] = {}
    item_bytes = 1 if form == "fp8" else 2
    needed = min(max(next_power_of_2(num_rows), 16), 128)
    for tile in TILES + (WIDE_TILES if num_rows > 128 else ()):
        block_m, block_k = tile.block_m or needed, tile.row_bytes // item_bytes
        if not tile.fits(block_m):
            continue
        num_tiles = cdiv(num_rows, block_m) * cdiv(shape.outputs, tile.block_n)
        full = [HOPPER_MULTIPROCESSORS * programs // num_tiles for programs in (1, tile.programs(block_m))]
        most = max(cdiv(shape.inputs, block_k) // 3, 1)
        for num_parts in sorted({max(min(parts, most), 1) for parts in (*full, min(full[1], 4), min(full[1], 2))}):
            name = f"{tile.block_n}x{tile.row_bytes}x{tile.num_stages}w{tile.num_warps}p{num_parts}"
            found[name + (f"m{tile.block_m}" if tile.block_m else "")] = Tiling(
                block_m, tile.block_n, block_k, num_parts, tile.num_warps, tile.num_stages
            )
    return found


class Product:
    """A weight of one form, by cuBLAS and by the kernel for few rows."""

    def __init__(self, shape: Shape, form: str, arrived: torch.Tensor) -> None:
        self.arrived = arrived
        self.scales = None
        self.weight = torch.randn(shape.outputs, shape.inputs, dtype=DTYPE).mul_(shape.inputs**-0.5)
        if form == "fp8":
            quantized = quantize(self.weight, ROWS)
            self.weight, self.scales = quantized.values, quantized.scales.flatten()

    def cublas(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return F.linear(x, self.weight)
        assert self.scales is not None
        if x.values.is_cpu:
            return self.exact(x).to(x.dtype)
        return torch._scaled_mm(
            x.values,
            self.weight.t(),
            scale_a=x.scales,
            scale_b=self.scales[None, :],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def exact(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x.float() @ self.weight.float().t()
        assert self.scales is not None
        return (x.values.float() * x.scales) @ (self.weight.float() * self.scales[:, None]).t()

    def few(self, tiling: Tiling, x: torch.Tensor | QuantizedRows, *, gated: bool = False) -> torch.Tensor:
        return few_rows_linear(x, self.weight, self.scales, None, self.arrived, tiling, gated=gated)


def inputs(form: str, num_rows: int, size: int) -> torch.Tensor | QuantizedRows:
    x = torch.randn(num_rows, size, dtype=DTYPE)
    return quantize(x, ROWS) if form == "fp8" else x


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Mean, relative."""
    return float((ours.float() - theirs.float()).abs().mean() / theirs.float().abs().mean())


def check(form: str) -> None:
    """Odd sizes: outputs and inputs that end within a block, tiles with several parts, gates."""
    arrived = torch.zeros(4096, dtype=torch.int32)
    for num_rows, outputs, size in ((3, 200, 336), (19, 144, 2064), (50, 528, 1040), (100, 336, 1552), (250, 80, 784)):
        shape = Shape("odd", "odd", outputs, size)
        product, x = Product(shape, form, arrived), inputs(form, num_rows, size)
        exact = product.exact(x)
        gate, up = exact.chunk(2, dim=-1)
        for name, tiling in tilings(shape, form, num_rows).items():
            for gated, expected in ((False, exact), (True, F.silu(gate) * up)):
                try:
                    error = difference(product.few(tiling, x, gated=gated), expected)
                except Exception as problem:
                    report(f"FAILED {form} {num_rows} x {size} -> {outputs} {name}: {str(problem)[:200]}")
                    continue
                if not error < 0.01 or arrived.any():
                    report(f"WRONG {form} {num_rows} x {size} -> {outputs} {name} gated={gated}: {error:.4f}")
                    arrived.zero_()
    report(f"checked {form}")


def report(text: str) -> None:
    print(text, flush=True)


@dataclass(slots=True)
class Timer:
    """Times calls within a CUDA graph. Without a GPU each is only called once."""

    is_real: bool = field(default_factory=torch.cuda.is_available)
    stream: Any = None
    pool: Any = None
    graph: Any = None  # the last one: a pool without graphs cannot be used again

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Of one call, on the average."""
        if not self.is_real:
            started = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - started) / len(calls)
        if self.stream is None:
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            # `torch.cuda.graph` would collect garbage each time.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
            self.graph = graph
            self._replay(graph, 1)
            first = self._replay(graph, 1)
            count = max(round(WARM_SECONDS / first), 2)
            return min(self._replay(graph, count) for _ in range(2)) / len(calls)

    def _replay(self, graph: Any, count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / count


Times = dict[str, float]  # microseconds by tiling


def time_shape(shape: Shape, form: str, all_rows: Sequence[int], timer: Timer) -> Iterator[dict[str, Any]]:
    """Of rows that need one BLOCK_M, the most are timed with all tilings, the others with the best of these."""
    arrived = torch.zeros(4096, dtype=torch.int32)
    products = [Product(shape, form, arrived) for _ in range(num_copies(shape.num_bytes(form)))]
    best: dict[int, list[str]] = {}
    for num_rows in sorted(all_rows, reverse=True):
        x = inputs(form, num_rows, shape.inputs)
        expected = products[0].cublas(x)
        times: Times = {"cuBLAS": timer.seconds([partial(product.cublas, x) for product in products]) * 1e6}
        block_m = max(next_power_of_2(num_rows), 16)
        for name, tiling in tilings(shape, form, num_rows).items():
            if name not in best.get(block_m, [name]):
                continue
            try:
                error = difference(products[0].few(tiling, x), expected)
                if not error < 0.02:
                    report(f"WRONG {form} {shape} {num_rows} rows {name}: {error:.4f}")
                times[name] = timer.seconds([partial(product.few, tiling, x) for product in products]) * 1e6
            except Exception as problem:
                report(f"FAILED {form} {shape} {num_rows} rows {name}: {str(problem)[:200]}")
        ranked = sorted((name for name in times if name != "cuBLAS"), key=times.__getitem__)
        best.setdefault(block_m, ranked[:4])
        floor = shape.num_bytes(form) / BANDWIDTH * 1e6
        yield {
            "model": shape.model,
            "product": shape.name,
            "form": form,
            "rows": num_rows,
            "floor": round(floor, 2),
            "best": ranked[0] if ranked else "cuBLAS",
            "times": {name: round(times[name], 2) for name in ("cuBLAS", *ranked)},
        }


def line(row: dict[str, Any]) -> str:
    times, best = row["times"], row["best"]
    rate = row["floor"] / times[best] * BANDWIDTH / 1e9
    others = " ".join(f"{name}={value:.1f}" for name, value in list(times.items())[2:])
    return (
        f"{row['model']:5}{row['product']:8}{row['form']:5}{row['rows']:4} floor {row['floor']:6.1f} cuBLAS "
        f"{times['cuBLAS']:6.1f} best {times[best]:6.1f} us {rate:5.0f} GB/s {row['floor'] / times[best]:4.0%} {best} "
        f"| {others}"
    )


class Layer:
    """A layer's products with what lies between them, attention left out."""

    def __init__(self, model: str, shapes: Sequence[Shape], form: str, arrived: torch.Tensor) -> None:
        self.form = form
        self.products = {shape.name: Product(shape, form, arrived) for shape in shapes}
        self.norm_weight = torch.ones(shapes[0].inputs, dtype=DTYPE)

    def run(
        self,
        tilings: dict[str, Tiling | None],
        attended: torch.Tensor,
        residual: torch.Tensor,
        *,
        gated: bool,
    ) -> torch.Tensor:
        """A tiling of None: cuBLAS."""
        x = self.multiply("o", self.quantized(attended), tilings)
        y, residual = self.norm(x, residual)
        tiling = tilings["gate_up"]
        if gated and tiling is not None:
            inner = self.quantized(self.products["gate_up"].few(tiling, y, gated=True))
        else:
            both = self.multiply("gate_up", y, tilings)
            inner = silu_and_mul_fp8(both, ROWS) if self.form == "fp8" else silu_and_mul(both)
        y, residual = self.norm(self.multiply("down", inner, tilings), residual)
        return self.multiply("qkv", y, tilings)

    def multiply(self, name: str, x: torch.Tensor | QuantizedRows, tilings: dict[str, Tiling | None]) -> torch.Tensor:
        product, tiling = self.products[name], tilings[name]
        return product.cublas(x) if tiling is None else product.few(tiling, x)

    def quantized(self, x: torch.Tensor) -> torch.Tensor | QuantizedRows:
        return quantize(x, ROWS) if self.form == "fp8" else x

    def norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor | QuantizedRows, torch.Tensor]:
        if self.form == "fp8":
            return rms_norm_fp8(x, residual, self.norm_weight, 1e-6, ROWS)
        return add_rms_norm(x, residual, self.norm_weight, 1e-6)


def time_layers(
    model: str, shapes: Sequence[Shape], form: str, rows: list[dict[str, Any]], all_rows: Sequence[int], timer: Timer
) -> Iterator[dict[str, Any]]:
    """By rows of x: a layer with cuBLAS, with the engine's tilings, and, of products that were timed, with the best one
    of each, its beginning read in advance or not."""
    arrived = torch.zeros(4096, dtype=torch.int32)
    num_bytes = sum(shape.num_bytes(form) for shape in shapes)
    layers = [Layer(model, shapes, form, arrived) for _ in range(num_copies(num_bytes))]
    for num_rows in all_rows:
        ways: dict[str, tuple[bool, dict[str, Tiling | None]]] = {
            "cuBLAS": (False, dict.fromkeys(layers[0].products)),
            "engine": (True, engine_tilings(shapes, form, num_rows)),
        }
        best = {row["product"]: row["best"] for row in rows if row["rows"] == num_rows}
        if all(shape.name in best for shape in shapes):
            chosen = {shape.name: tilings(shape, form, num_rows)[best[shape.name]] for shape in shapes}
            for gated, size in itertools.product((False, True), (0, 256, 512, 1024)):
                tuned = {name: replace(tiling, prefetch_bytes=size) for name, tiling in chosen.items()}
                ways[f"{'gated' if gated else 'plain'} {size}"] = gated, {**tuned}
        attended = torch.randn(num_rows, shapes[1].inputs, dtype=DTYPE)
        residual = torch.randn(num_rows, shapes[0].inputs, dtype=DTYPE)
        times: Times = {}
        for name, (gated, each) in ways.items():
            calls = [partial(layer.run, each, attended, residual, gated=gated) for layer in layers]
            try:
                for call in calls:
                    call()
                times[name] = 1e6 * timer.seconds(calls)
            except Exception as problem:
                report(f"FAILED layer {model} {form} {num_rows} {name}: {str(problem)[:200]}")
        floor = num_bytes / BANDWIDTH * 1e6
        yield {"layer": model, "form": form, "rows": num_rows, "floor": round(floor, 1), "times": times}


def engine_tilings(shapes: Sequence[Shape], form: str, num_rows: int) -> dict[str, Tiling | None]:
    item_bytes, tiles = 1 if form == "fp8" else 2, TILINGS[90].few_rows
    assert tiles is not None
    return {
        shape.name: few_rows_tiling(num_rows, shape.outputs, shape.inputs, item_bytes, HOPPER_MULTIPROCESSORS, tiles)
        for shape in shapes
    }


def layer_line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {value:.1f}" for name, value in row["times"].items())
    return f"layer {row['layer']:5}{row['form']:5}{row['rows']:4} rows: floor {row['floor']:.1f}, {times}"


def variants(forms: Sequence[str], all_rows: Sequence[int], *, engine: bool) -> list[Variant]:
    """All that a run launches, found on meta tensors."""

    def launch(form: str, num_rows: int) -> None:
        arrived = torch.zeros(4096, dtype=torch.int32)
        for shape in () if engine else (*itertools.chain(*LAYERS.values()), *HEADS, ODD):
            product, x = Product(shape, form, arrived), inputs(form, num_rows, shape.inputs)
            for tiling in tilings(shape, form, num_rows).values():
                for gated in (False, True) if shape in (ODD, LAYERS["8B"][2]) else (False,):
                    for parts in (1, 2) if shape is ODD else (tiling.num_parts,):
                        product.few(replace(tiling, num_parts=parts), x, gated=gated)
        for model in ("8B", "0.6B"):
            layer, shapes = Layer(model, LAYERS[model], form, arrived), LAYERS[model]
            attended = torch.empty(num_rows, shapes[1].inputs, dtype=DTYPE)
            residual = torch.empty(num_rows, shapes[0].inputs, dtype=DTYPE)
            chosen = engine_tilings(shapes, form, num_rows)
            for gated in (False, True):
                layer.run(chosen, attended, residual, gated=gated)

    def launch_all() -> None:
        for form, num_rows in itertools.product(forms, all_rows):
            launch(form, num_rows)

    with torch.inference_mode(), torch.device("meta"):
        return record(launch_all)


def compile_share(text: str, forms: Sequence[str], all_rows: Sequence[int], *, engine: bool) -> None:
    share, count = map(int, text.split("/"))
    started = time.monotonic()
    found = variants(forms, all_rows, engine=engine)[share::count]
    for variant in found:
        try:
            kernel = variant.compile()
            if torch.cuda.is_available():
                compile_launcher(kernel)
        except Exception as problem:
            report(f"FAILED to compile {variant.specialization[:300]}: {str(problem)[:300]}")
    report(f"compiled {len(found)} variants, share {text}, in {time.monotonic() - started:.0f} s")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--seconds", type=float, default=600, help="after so many no other product is begun")
    parser.add_argument("--compile-only", metavar="I/N", help="compile this share of the kernels for Hopper")
    parser.add_argument("--engine", action="store_true", help="layers alone, with cuBLAS and with the engine's tilings")
    parser.add_argument("--tiny", action="store_true", help="only to check that everything runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.compile_only:
        compile_share(arguments.compile_only, arguments.forms, arguments.rows, engine=arguments.engine)
        return
    started = time.monotonic()
    timer = Timer()
    document: dict[str, Any] = {"products": [], "layers": []}

    def keep(kind: str, row: dict[str, Any], text: str) -> None:
        report(text)
        document[kind].append(row)
        if arguments.json is not None:
            write_json(arguments.json, document)

    with torch.inference_mode(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        layers = {"tiny": TINY} if arguments.tiny else {model: LAYERS[model] for model in arguments.models}
        heads = [] if arguments.tiny else [head for head in HEADS if head.model in layers]
        for form in arguments.forms:
            if not arguments.engine:
                check(form)
                for model, shapes in layers.items():
                    if form == "fp8" and model == "30B":
                        continue
                    for shape in shapes + [head for head in heads if head.model == model and form == "bf16"]:
                        if time.monotonic() - started > arguments.seconds:
                            report(f"no time for {form} {shape}")
                            continue
                        for row in time_shape(shape, form, arguments.rows, timer):
                            keep("products", row, line(row))
                        if torch.cuda.is_available():
                            torch.cuda.empty_cache()
            for model, shapes in layers.items():
                if {shape.name for shape in shapes} == {"qkv", "o", "gate_up", "down"}:
                    rows = [row for row in document["products"] if row["model"] == model and row["form"] == form]
                    for row in time_layers(model, shapes, form, rows, arguments.rows, timer):
                        keep("layers", row, layer_line(row))
    report(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
