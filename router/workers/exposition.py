"""The metrics of all workers as one text: every series once for each worker, told apart by a label.

Summing them up here would lose what a counter needs: when a worker is started again, its counters
begin at 0, which is seen only in a series of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

_END = b"# EOF\n"
"""Of a text in OpenMetrics' format."""


def joined(texts: Mapping[int, bytes]) -> bytes:
    """One text of Prometheus' format, or of OpenMetrics', from several.

    Args:
        texts: By number of the worker; each with a line of help before every metric.
    """
    is_ended = any(text.endswith(_END) for text in texts.values())
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for number, text in sorted(texts.items()):
        label = b'worker="%d"' % number
        name = b""
        for line in text.removesuffix(_END).splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                is_new = name not in heads
                heads.setdefault(name, [])
            if not line.startswith(b"#"):
                samples.setdefault(name, []).append(_labelled(line, label))
            elif is_new:
                heads[name].append(line)
    lines = [line for name in heads for line in (*heads[name], *samples.get(name, ()))]
    return b"\n".join(lines) + b"\n" + (_END if is_ended else b"")


def _labelled(line: bytes, label: bytes) -> bytes:
    for at, byte in enumerate(line):
        if byte == 0x7B:  # {
            return line[: at + 1] + label + b"," + line[at + 1 :]
        if byte == 0x20:
            return line[:at] + b"{" + label + b"}" + line[at:]
    return line
