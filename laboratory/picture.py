"""Draw README's moving picture, from the killed worker as it really goes (make picture)."""

from __future__ import annotations

from html import escape
from pathlib import Path

from laboratory.client import Moment
from laboratory.results import Result
from laboratory.stage import open_stage
from laboratory.stories import STORIES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "killed-worker.svg"
STORY = STORIES["kill-worker"]
WIDTH, TOP, STEP = 450, 100, 27  # of the picture's own units: a phone shows some 360 of them
LANES = ((20, 180), (214, 220))  # where each begins, and how wide it is
SECONDS = 14  # of one round: half of it tells the story, the rest shows how it ended
AHEAD = 8  # seconds of the first round that are left out: so the first that is seen is the end

WORDS = {
    "request": "app pays",
    "retry": "app retries",
    "the view’s commit()": "commit() held",
    "commit": "committed",
    "SIGKILL": "kill -9",
    "409 Conflict, wait 1 s": "409, wait 1 s",
    "one row": "one payment",
    "two rows": "two payments",
}
"""Of the time line, only what the story turns on, shortened: a line has room for 16 characters."""

STYLE = """
  text { font: 16px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1d2428 }
  .paper { fill: #ffffff; stroke: #d5d9d6 } .soft { fill: #56616a }
  .head { font-size: 18px; font-weight: 700 } .lane, .strong { font-weight: 700 }
  .time { text-anchor: end; font-size: 14px; fill: #56616a }
  .once { fill: #e2f2ee } .twice { fill: #fde8e7 }
  .verdict { font-size: 16px; font-weight: 700 }
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
    told = [[moment for moment in result.moments if moment.what in WORDS] for result in results]
    most = max(map(len, told))
    height = TOP + most * STEP + 68
    said = " ".join(f"{each.lane.title}: {each.verdict}" for each in results)
    lanes = "".join(
        _lane(number, result, moments, most)
        for number, (result, moments) in enumerate(zip(results, told, strict=True))
    )
    # All of the animation is under the condition: who wants no motion sees the end at once.
    animation = f".moment {{ animation: var(--appears) {SECONDS}s -{AHEAD}s infinite }}"
    moves = f"  @media (prefers-reduced-motion: no-preference) {{ {animation} }}\n"
    times = moves + "".join(_appears(place, most) for place in range(most + 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-labelledby="title desc">\n<title id="title">{escape(STORY.told)}</title>\n'
        f'<desc id="desc">{escape(said)}</desc>\n<style>{STYLE}{times}</style>\n'
        f'<rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>\n'
        f'<text class="head" x="20" y="36">The worker is killed. The app retries.</text>\n'
        f"{lanes}</svg>\n"
    )


def _lane(number: int, result: Result, moments: list[Moment], most: int) -> str:
    left, width = LANES[number]
    title = result.lane.title if result.lane.is_protected else "Without"
    lines = [f'<text class="lane" x="{left}" y="72">{escape(title)}</text>']
    for place, moment in enumerate(moments):
        kind = "kill" if moment.what == "SIGKILL" else "strong" if moment.who == "counted" else ""
        y, seconds = TOP + place * STEP, moment.at - result.began
        lines.append(
            f'<g class="moment" style="--appears: m{place}">'
            f'<text class="time" x="{left + 44}" y="{y}">{seconds:.2f} s</text>'
            f'<text class="{kind}" x="{left + 54}" y="{y}">{escape(WORDS[moment.what])}</text></g>'
        )
    y, verdict = TOP + most * STEP + 4, result.verdict.removeprefix("Alice ").capitalize()
    lines.append(
        f'<g class="moment" style="--appears: m{most}">'
        f'<rect class="{result.kind}" x="{left - 4}" y="{y}" width="{width}" height="44" rx="8"/>'
        f'<text class="verdict" x="{left + 8}" y="{y + 29}">{escape(verdict)}</text></g>'
    )
    return "\n".join(lines) + "\n"


def _appears(place: int, most: int) -> str:
    """When a line of the time line appears: all of them within the first half of a round."""
    at = place * 50 / most
    hidden, seen = f"0%, {at:.1f}% {{ opacity: 0 }}", f"{at + 1:.1f}%, 98% {{ opacity: 1 }}"
    return f"@keyframes m{place} {{ {hidden} {seen} }}\n"


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
