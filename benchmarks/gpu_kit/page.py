"""The Markdown page of results."""

from collections.abc import Iterable, Mapping
from typing import Any

Answer = Mapping[str, Any]
KERNELS = 12
"""Number of kernels of a model that are shown."""
_KERNEL = ("phase", "cause", "operation", "source", "launches", "measured ms", "predicted")


def page(document: Mapping[str, Any]) -> str:
    """Formats hardware, versions and date, the results of each part, and the parts that did not finish."""
    parts: Mapping[str, Answer] = document["parts"]
    about = parts.get("machine", {})
    blocks = [
        f"# {about.get('device', 'unknown hardware')}, {document['date']}",
        f"`{document['command']}`, {document['seconds']:.0f} s. Times are medians of three rounds of back-to-back "
        "calls; *plan* and *inspect* are predictions, computed before anything ran.",
        machine(about),
        speeds(parts),
        *(causes(name, answer) for name, answer in parts.items() if answer.get("causes")),
        numbers(parts.get("numbers", {})),
        features(parts.get("features", {})),
        resumed(parts.get("resume", {})),
        commands(parts.get("commands", {})),
        collectives(parts.get("collectives", {})),
        meshes(parts.get("meshes", {})),
        states(parts),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Formats a Markdown table; "" without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    heads = list(heads)
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines]) if lines else ""


def machine(about: Answer) -> str:
    """Formats hardware, versions, fastest matrix product and copy."""
    lines = [f"- {line}" for line in about.get("nvidia_smi", ())]
    lines += [f"- {about['devices']} x {about['device']}, {about['memory'] / 1e9:.1f} GB"] if "device" in about else []
    versions = about.get("versions", {})
    lines += ["- " + ", ".join(f"{name} {number}" for name, number in versions.items())] if versions else []
    lines += [f"- Python {about['python']}, {about['system']}"] if "python" in about else []
    for dtype, product in about.get("products", {}).items():
        lines.append(
            f"- fastest matrix product in {dtype}: {product['best']:.1f} TFLOP/s{_of_peak(about, dtype, product)}"
        )
    if "copy_gb" in about:
        lines.append(
            f"- memory bandwidth of a copy: {about['copy_gb']:.0f} GB/s{_of(about['copy_gb'], about['bandwidth_gb'])}"
        )
    return "\n".join(lines)


def _of_peak(about: Answer, dtype: str, product: Answer) -> str:
    if dtype != "bfloat16" or not about.get("peak_tflops"):
        return ""
    share = product["best"] / about["peak_tflops"]
    return f", {share:.1%} of the datasheet's peak (predictions assume {about['sustained_assumed']:.1%})"


def _of(value: float, datasheet: float | None) -> str:
    return f", {value / datasheet:.1%} of the datasheet's" if datasheet else ""


def speeds(parts: Mapping[str, Answer]) -> str:
    """Formats a row for each model that ran."""
    best = parts.get("machine", {}).get("products", {}).get("bfloat16", {}).get("best")
    heads = (
        "model",
        "samples",
        "ms",
        "MFU",
        "of fastest product",
        "GB",
        "PyTorch ms",
        "speedup",
        "GB",
        "plan",
        "inspect",
    )
    rows = []
    for name, answer in parts.items():
        if not name.startswith("speed ") or "seconds" not in answer:
            continue
        torch, predictions = answer.get("torch", {}), answer["predicted"]
        rows.append(
            (
                f"{name.removeprefix('speed ')} ({answer['parameters'] / 1e6:,.0f}M)",
                f"{answer['microbatches']} x {answer['microbatch']} x {answer['sequence']:,}",
                _ms(answer["seconds"]),
                _percent(answer.get("mfu")),
                _percent(answer["tflops"] / best if best else None),
                _gigabytes(answer.get("peak_bytes")),
                _ms(torch.get("seconds")),
                f"{torch['seconds'] / answer['seconds']:.2f}" if "seconds" in torch else "-",
                _gigabytes(torch.get("peak_bytes")),
                *(_predicted(predictions[f"{by}_seconds"], answer["seconds"]) for by in ("plan", "inspect")),
            )
        )
    return "## Speed\n\n" + table(heads, rows) if rows else ""


def causes(name: str, answer: Answer) -> str:
    """Formats a model's step time by cause and phase, next to the prediction."""
    rows = [(cause, _ms(each["measured"]), _ms(each["predicted"])) for cause, each in answer["causes"].items()]
    rows += [("step as traced", _ms(answer["traced_seconds"]), _ms(answer["predicted"]["inspect_seconds"]))]
    rows += [(f"*{phase}*", _ms(each["measured"]), _ms(each["predicted"])) for phase, each in answer["phases"].items()]
    text = f"### Where the time goes: {name.removeprefix('speed ')}\n\n" + table(("", "measured ms", "predicted"), rows)
    off = [_kernel(each) for each in answer.get("kernels", ())[:KERNELS] if each["predicted"] is not None]
    return text + ("\n\nKernels, those farthest from their prediction first:\n\n" + table(_KERNEL, off) if off else "")


def _kernel(each: Answer) -> tuple[str, ...]:
    what = (each["phase"], each["cause"], f"`{each['path'] or each['opcode']}`", each["source"] or "-")
    return (*what, f"{each['launches']:,.0f}", _ms(each["measured"]), _ms(each["predicted"]))


def numbers(answer: Answer) -> str:
    """Formats errors with their limits, and the two checks."""
    rows = [
        (case["family"], case["case"], f"{case['error']:.2e}", f"{case['limit']:.2e}", _verdict(case["ok"]))
        for case in answer.get("cases", ())
    ]
    if not rows:
        return ""
    lines = ["Gradients: norm of the difference from float32 on the CPU, over its norm.", ""]
    lines += [table(("family", "", "error", "limit", ""), rows), ""]
    if over := answer.get("overflow"):
        verdict = _verdict(over["ok"])
        lines.append(f"float16, loss scale too large: {over['skipped']} steps skipped, then it trains: {verdict}.")
    if twice := answer.get("deterministic"):
        lines.append(f"`--deterministic`, three steps twice, bit-identical: {_verdict(twice['ok'])}.")
    return "## Numbers\n\n" + "\n".join(lines)


def features(answer: Answer) -> str:
    """Formats each feature's error with its limit, or why it failed."""
    rows = [
        (row["feature"], row["attention"], f"{row['error']:.2e}", f"{row['limit']:.2e}", _verdict(row["ok"]))
        if row["error"] is not None
        else (row["feature"], "-", row["why"], "-", _verdict(row["ok"]))
        for row in answer.get("features", ())
    ]
    heads = ("feature", "attention", "error", "limit", "")
    return "## Gradients of features, in bfloat16\n\n" + table(heads, rows) if rows else ""


def commands(answer: Answer) -> str:
    """Formats what commands found on the GPU and on the CPU."""
    if "texts" not in answer:
        return ""
    rows = [(name, f"{value:.6f}") for name, value in answer["perplexities"].items()]
    rows += [(name, " ".join(text.split())[:60]) for name, text in answer["texts"].items()]
    rows += [(f"{name}, failed", why) for name, why in answer["failed"].items()]
    same = f"The same perplexity and greedy text on GPU and CPU: {_verdict(answer.get('ok', False))}."
    return f"## Commands\n\n{table(('command', 'perplexity or text'), rows)}\n\n{same}"


def resumed(answer: Answer) -> str:
    """Formats whether a killed and resumed run equals an uninterrupted one."""
    if "ok" not in answer:
        return ""
    return f"A run of {answer['steps']} steps that was killed and resumed, bit-identical: {_verdict(answer['ok'])}."


def collectives(answer: Answer) -> str:
    """Formats NCCL bandwidth by operation and size."""
    rows = [
        (
            r["operation"],
            f"{r['bytes'] / 1e6:,.2f}",
            f"{1e6 * r['seconds']:,.1f}",
            f"{r['bus_gb']:.1f}",
            _us(r.get("predicted")),
        )
        for r in answer.get("rows", ())
    ]
    heads = ("", "MB", "us", "bus GB/s", "predicted us")
    return f"## NCCL on {answer['ways']} GPUs\n\n" + table(heads, rows) if rows else ""


def meshes(answer: Answer) -> str:
    """Formats the speed of one model on different meshes."""
    rows = []
    for r in answer.get("rows", ()):
        if "seconds" not in r:
            rows.append((r["mesh"], r["layout"], r.get("error", "-"), *["-"] * 6))
            continue
        predictions = r["predicted"]
        by = (_predicted(predictions[f"{name}_seconds"], r["seconds"]) for name in ("plan", "inspect"))
        of_one, peak = _percent(r.get("of_one")), _gigabytes(r["peak_bytes"])
        rows.append(
            (r["mesh"], r["layout"], _ms(r["seconds"]), f"{r['tflops']:.0f}", _percent(r.get("mfu")), of_one, peak, *by)
        )
    heads = ("mesh", "layout", "ms", "TFLOP/s", "MFU", "of one GPU", "GB", "plan", "inspect")
    return "## Meshes\n\n" + table(heads, rows) if rows else ""


def states(parts: Mapping[str, Answer]) -> str:
    """Formats the parts that were skipped or failed, and why."""
    lines = []
    for name, answer in parts.items():
        sides = [(name, answer), *([(f"{name}, PyTorch", answer["torch"])] if "torch" in answer else [])]
        lines += [
            f"- {n}: {a['state']}: {a.get('error', 'its time limit was reached')}"
            for n, a in sides
            if a["state"] != "done"
        ]
        lines += [f"- {name}: the trace can't be read: {answer['trace_error']}"] if "trace_error" in answer else []
        lines += [f"- {name}: its kernels: {answer['kernels_not_read']}"] if "kernels_not_read" in answer else []
    return "## Not run, or not to the end\n\n" + "\n".join(lines) if lines else ""


def _verdict(ok: bool) -> str:
    return "holds" if ok else "**WRONG**"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:,.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.1f}"


def _predicted(seconds: float | None, measured: float) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f} ({seconds / measured - 1:+.0%})"
