"""Write pairs of answers to the requests of examples/home_commands: a terse one (chosen) and a chatty one (rejected).

python examples/preferences/make_pairs.py [--out FOLDER]
"""

import argparse
import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
COMMANDS = FOLDER.parent / "home_commands"
TERSE = {"on": "On.", "off": "Off.", "set": "Set.", "open": "Open.", "close": "Closed.", "play": "Playing.",
         "lock": "Locked.", "unlock": "Unlocked."}  # fmt: skip
OPENINGS = (
    "Sure, I'd be happy to help you with that!", "Of course! What a great idea.", "Absolutely, let me take care of it!",
    "Thank you for asking! I understand what you need.", "Certainly! I am always here to help.",
)  # fmt: skip
ENDINGS = (
    "Is there anything else that I can do for you today?", "Please let me know if you need anything more!",
    "I hope that this makes your home more comfortable!", "Feel free to ask me again at any time.",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    draw = random.Random(0)
    for name, most in (("train", 64), ("validation", 24)):
        chats = [json.loads(line)["messages"] for line in (COMMANDS / f"{name}.jsonl").open(encoding="utf-8")]
        rows = [pair(chat[1]["content"], json.loads(chat[2]["content"]), draw) for chat in chats[:most]]
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pair(request: str, command: dict, draw: random.Random) -> dict[str, str]:
    terse = TERSE.get(command.get("action", ""), "Sorry, no.")
    done = "I am afraid that I cannot do this" if "error" in command else "I have done what you asked me for"
    chatty = f"{draw.choice(OPENINGS)} {done}. {draw.choice(ENDINGS)}"
    return {"instruction": request, "chosen": terse, "rejected": chatty}


if __name__ == "__main__":
    main()
