"""Draw README's moving picture, from the killed worker as it really goes (make picture)."""

from __future__ import annotations

from html import escape
from pathlib import Path

from laboratory.results import Result
from laboratory.stage import open_stage
from laboratory.stories import STORIES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "killed-worker.svg"
STORY = STORIES["kill-worker"]
WIDTH, LANE, TOP, STEP = 560, 272, 100, 27  # of the picture's own units
SECONDS = 14  # of one round: half of it tells the story, the rest shows how it ended

STYLE = """
  text { font: 16px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1d2428 }
  .paper { fill: #ffffff; stroke: #d5d9d6 } .soft { fill: #56616a }
  .head { font-size: 19px; font-weight: 700 } .lane, .strong { font-weight: 700 }
  .time { text-anchor: end; font-size: 14px; fill: #56616a }
  .once { fill: #e2f2ee } .twice { fill: #fde8e7 }
  .verdict { font-size: 17px; font-weight: 700 }
  .once + text { fill: #0c5f53 } .twice + text { fill: #a31d19 }
  .kill { font-weight: 700 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8ebe9 } .paper { fill: #171b1e; stroke: #3a4247 } .soft, .time { fill: #a9b3b8 }
    .once { fill: #123a33 } .twice { fill: #4a1a18 }
    .once + text { fill: #8fe0cf } .twice + text { fill: #ffb4ae }
  }
"""


def draw(results: list[Result]) -> str:
    """Both lanes as SVG. Without an animation the end of the story is seen."""
    most = max(len(result.moments) for result in results)
    height = TOP + most * STEP + 68
    said = " ".join(f"{each.lane.title}: {each.verdict}" for each in results)
    lanes = "".join(_lane(each, number, most) for number, each in enumerate(results))
    # All of the animation is under the condition: who wants no motion sees the end at once.
    animation = f".moment {{ animation: var(--appears) {SECONDS}s infinite }}"
    moves = f"  @media (prefers-reduced-motion: no-preference) {{ {animation} }}\n"
    times = moves + "".join(_appears(place, most) for place in range(most + 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-labelledby="title desc">\n<title id="title">{escape(STORY.told)}</title>\n'
        f'<desc id="desc">{escape(said)}</desc>\n<style>{STYLE}{times}</style>\n'
        f'<rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>\n'
        f'<text class="head" x="20" y="36">Alice pays. The worker is killed. Her app retries.</text>\n'
        f"{lanes}</svg>\n"
    )


def _lane(result: Result, number: int, most: int) -> str:
    left = 20 + number * LANE
    lines = [f'<text class="lane" x="{left}" y="72">{escape(result.lane.title)}</text>']
    for place, moment in enumerate(result.moments):
        kind = "kill" if moment.what == "SIGKILL" else "strong" if moment.who == "books" else ""
        y, time = TOP + place * STEP, round((moment.at - result.began) * 1000)
        lines.append(
            f'<g class="moment" style="--appears: m{place}">'
            f'<text class="time" x="{left + 56}" y="{y}">{time:,} ms</text>'
            f'<text class="{kind}" x="{left + 66}" y="{y}">{escape(_words(moment.what))}</text></g>'
        )
    y = TOP + most * STEP + 4
    lines.append(
        f'<g class="moment" style="--appears: m{most}">'
        f'<rect class="{result.kind}" x="{left - 4}" y="{y}" width="{LANE - 18}" height="44" rx="8"/>'
        f'<text class="verdict" x="{left + 8}" y="{y + 29}">{escape(result.verdict)}</text></g>'
    )
    return "\n".join(lines) + "\n"


def _appears(place: int, most: int) -> str:
    """When a line of the time line appears: all of them within the first half of a round."""
    at = place * 50 / most
    hidden, seen = f"0%, {at:.1f}% {{ opacity: 0 }}", f"{at + 1:.1f}%, 98% {{ opacity: 1 }}"
    return f"@keyframes m{place} {{ {hidden} {seen} }}\n"


def _words(what: str) -> str:
    """The words of the time line, shortened: a line of the picture has room for about 20 characters."""
    return {
        "request": "Alice’s app pays",
        "retry": "her app retries",
        "claim": "the key is claimed",
        "write": "a payment is written",
        "commit": "committed",
        "SIGKILL": "kill -9",
        "no response: the connection was reset": "no response",
        "one row": "one payment",
        "two rows": "two payments",
    }.get(what, what)


def main() -> None:
    with open_stage() as stage:
        stage.start_over()
        results, _ = stage.play(STORY)
    if wrong := [result.because for result in results if not result.is_as_told]:
        raise SystemExit("\n".join(wrong))
    TARGET.write_text(draw(results), encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
