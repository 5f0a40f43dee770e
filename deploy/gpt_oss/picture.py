"""The steps of one stream at each K, bytes against time, as `outrider bench --synthetic` draws them."""

from __future__ import annotations

from deploy.gpt_oss.stages import sizes_of
from deploy.gpt_oss.table import GATEWAY, SERVED, Measured, bandwidth_of, served_rows
from outrider.cli.roofline import Point, roofline


def picture(measured: Measured) -> str:
    """An SVG; empty where no pair was served."""
    device, bandwidth = bandwidth_of(measured)
    rows = [row for stage in SERVED.values() for row in served_rows(measured, stage)]
    streams, prompt = sizes_of(measured["model"]).shown[0]
    points = []
    for row in rows:
        alike = row["streams"] == streams and row["each"][0]["prompt_tokens"] == prompt
        if alike and row["rounds_by"] == GATEWAY:  # a pair's own rounds have the same steps
            label, target = f"K={row['draft_tokens']}", row["bytes"]["target"]
            points.append(Point("target", label, sum(target.values()), row["verify"]))
            if row["draft_tokens"]:
                points.append(Point("draft", label, row["bytes"]["draft"], row["draft"]))
    if bandwidth is None or not points:
        return ""
    title = f"synthetic {measured['model']}, one stream, {prompt:,} tokens in: bytes against time"
    return roofline(points, bandwidth["read"], title, f"{device}, its bandwidth of reads dashed; acceptance by script")
