"""A page in a headless Chromium: what its document has become, and what its console said."""

import base64
import hashlib
import html
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

PROBED = "data-probed"


@dataclass(frozen=True)
class Opened:
    document: str
    """The document as HTML, after its scripts have run."""
    console: list[str]
    probed: Any
    """What the probe returned."""


def opened(text: str, folder: Path, *, probe: str = "", dark: bool = False, width: int = 1280) -> Opened:
    """``probe``: the body of a JavaScript function, which the page's policy is made to allow."""
    path = folder / "opened.html"
    path.write_text(with_probe(text, probe) if probe else text, encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",  # a container's root has no sandbox; the page is our own
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},900",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=5000",
            "--enable-logging=stderr",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    before, found, after = done.stdout.partition(f'{PROBED}="')
    probed = json.loads(html.unescape(after.split('"')[0])) if found else None
    return Opened(before + after, console, probed)


def with_probe(text: str, probe: str) -> str:
    """The page with one script more, after its own, and that script's hash in its policy."""
    script = f"document.documentElement.setAttribute('{PROBED}', JSON.stringify((() => {{{probe}}})()));"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    return text.replace("</body>", f"<script>{script}</script></body>")
