"""Write train.jsonl and validation.jsonl: requests to a smart home, each with its one JSON command.

    python examples/home_commands/make_data.py

The same seed writes the same files. No command of a validation row is the command of a training row: to answer it, a
model has to put together what it has learned from others (a room here, a device there, a number elsewhere).
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

Command = dict[str, Any]
Pair = tuple[str, Command]

SYSTEM = "Answer with one JSON command."
REFUSAL: Command = {"error": "unsupported"}
ROOMS = ("kitchen", "bedroom", "bathroom", "hallway", "office", "nursery", "garage", "attic")
WORDS = {
    5: "five", 10: "ten", 15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen", 19: "nineteen", 20: "twenty",
    21: "twenty-one", 22: "twenty-two", 23: "twenty-three", 24: "twenty-four", 25: "twenty-five", 30: "thirty",
    40: "forty", 45: "forty-five", 50: "fifty", 60: "sixty", 70: "seventy", 80: "eighty", 90: "ninety",
}  # fmt: skip
PERCENTS = (10, 20, 30, 40, 50, 60, 70, 80, 90)
DEGREES = (16, 17, 18, 19, 20, 21, 22, 23, 24, 25)
MINUTES = (5, 10, 15, 20, 25, 30, 40, 45, 60, 90)
MUSIC = ("jazz", "blues", "rock", "folk", "opera", "techno")

# Requests by device and action; {room} and {value} are filled in.
PHRASES: dict[tuple[str, str], tuple[str, ...]] = {
    ("lamp", "on"): (
        "turn on the {room} lamp", "switch the {room} light on", "lights on in the {room}",
        "I need some light in the {room}", "it's too dark in the {room}", "I can't see a thing in the {room}",
        "illuminate the {room}",
    ),
    ("lamp", "off"): (
        "turn off the {room} lamp", "switch the {room} light off", "kill the lights in the {room}",
        "lights out in the {room}", "nobody needs the light in the {room}", "make it dark in the {room}",
        "I left the {room} light on, fix that",
    ),
    ("lamp", "set"): (
        "dim the {room} lamp to {value} percent", "set the {room} light to {value}%",
        "{room} lights at {value} percent", "put the lamp in the {room} at about {value} percent",
        "I'd like {value} percent brightness in the {room}",
    ),
    ("heater", "on"): (
        "turn on the {room} heater", "heating on in the {room}", "I'm freezing in the {room}", "warm up the {room}",
        "it's chilly in the {room}",
    ),
    ("heater", "off"): (
        "turn off the {room} heater", "heating off in the {room}", "it's boiling in the {room}",
        "stop heating the {room}", "the {room} is way too warm",
    ),
    ("heater", "set"): (
        "set the {room} to {value} degrees", "make it {value} degrees in the {room}", "heat the {room} to {value}",
        "I want the {room} at {value} degrees", "{value} degrees in the {room}",
        "bring the {room} heater to {value} degrees",
    ),
    ("blinds", "open"): (
        "open the {room} blinds", "pull up the blinds in the {room}", "let some sun into the {room}",
        "raise the {room} shades", "I want to see outside from the {room}",
    ),
    ("blinds", "close"): (
        "close the {room} blinds", "pull down the blinds in the {room}", "the sun is blinding me in the {room}",
        "lower the {room} shades", "keep the sun out of the {room}",
    ),
    ("blinds", "set"): (
        "set the {room} blinds to {value} percent", "blinds in the {room} at {value}%",
        "move the {room} shades to {value} percent",
    ),
    ("speaker", "play"): (
        "play {value} in the {room}", "put on some {value} in the {room}",
        "I'm in the mood for {value} in the {room}", "start {value} music on the {room} speaker",
        "let me hear {value} in the {room}",
    ),
    ("speaker", "off"): (
        "stop the music in the {room}", "turn off the {room} speaker", "silence in the {room}",
        "no more music in the {room}", "quiet in the {room}",
    ),
    ("speaker", "set"): (
        "set the {room} volume to {value}", "volume at {value} percent in the {room}",
        "put the {room} speaker at {value} percent",
    ),
    ("fan", "on"): (
        "turn on the {room} fan", "get some air moving in the {room}", "it's stuffy in the {room}",
        "start the fan in the {room}",
    ),
    ("fan", "off"): (
        "turn off the {room} fan", "stop the fan in the {room}", "the {room} fan is too loud",
        "no more draught in the {room}",
    ),
    ("door", "lock"): ("lock the {room} door", "secure the {room} door", "make sure the {room} door is locked"),
    ("door", "unlock"): (
        "unlock the {room} door", "let them in through the {room} door", "undo the lock on the {room} door",
    ),
    ("timer", "set"): (
        "set a timer for {value} minutes", "remind me in {value} minutes", "{value} minute timer",
        "wake me in {value} minutes", "start a {value} minute countdown",
    ),
}  # fmt: skip
HOUSEHOLD: tuple[tuple[Command, tuple[str, ...]], ...] = (
    (
        {"room": "all", "device": "all", "action": "off"},
        ("turn everything off", "shut it all down", "everything off, I'm leaving", "switch off the whole house"),
    ),
    (
        {"room": "all", "device": "lamp", "action": "off"},
        ("all lights off", "turn off every lamp in the house", "lights out everywhere", "make the whole house dark"),
    ),
    (
        {"room": "all", "device": "lamp", "action": "on"},
        ("all lights on", "turn on every lamp in the house", "light up the whole house", "lights on everywhere"),
    ),
    (
        {"room": "all", "device": "blinds", "action": "close"},
        ("close all the blinds", "pull down every blind in the house", "blinds down everywhere"),
    ),
    (
        {"room": "all", "device": "door", "action": "lock"},
        ("lock all the doors", "lock up the house", "make sure every door is locked"),
    ),
)
UNSUPPORTED = (
    "order a pizza", "tell me a joke", "what's the weather like tomorrow", "call my mother",
    "book a taxi to the airport", "who won the match last night", "translate good morning into French",
    "how tall is Mount Everest", "write me a poem", "send an email to Anna", "buy two tickets for the concert",
    "what is seven times eight", "read me the news", "find a good Thai restaurant", "how do I bake bread",
    "wash the car", "sing me a song", "feed the cat", "what's the capital of Peru", "pay the electricity bill",
    "mow the lawn", "do my homework", "walk the dog", "how old is the universe", "recommend a book",
    "when does the train leave", "take out the rubbish", "iron my shirts", "post a picture of my lunch",
    "what did I dream about", "is it going to snow", "cancel my dentist appointment", "find my glasses",
    "spell onomatopoeia", "who wrote Hamlet", "plan a trip to Rome", "water my neighbour's plants",
    "what time is it in Tokyo", "sell my bicycle", "paint the fence", "tie my shoes", "clean the windows",
    "book a hotel in Vienna", "fix my bicycle", "order flowers for my wife", "cook dinner", "do the dishes",
    "empty the bin", "wash my hair", "cut the grass", "make me a sandwich", "buy a new sofa", "call a plumber",
    "what day is it", "tell me a story", "who painted the Mona Lisa", "rent a car for Sunday",
    "send my boss a message", "invite Tom for Friday", "sort my photos", "how far is the moon",
    "pick up the children", "reserve two seats", "count to a hundred", "what should I wear today",
    "find a cheap flight",
)  # fmt: skip
IMPERATIVES = {
    "book", "bring", "buy", "call", "cancel", "clean", "close", "cook", "count", "cut", "dim", "do", "empty", "feed",
    "find", "fix", "get", "heat", "illuminate", "invite", "iron", "keep", "kill", "let", "light", "lock", "lower",
    "make", "move", "mow", "open", "order", "paint", "pay", "pick", "plan", "play", "post", "pull", "put", "raise",
    "read", "recommend", "remind", "rent", "reserve", "secure", "sell", "send", "set", "shut", "sing", "sort",
    "spell", "start", "stop", "switch", "take", "tell", "tie", "translate", "turn", "undo", "unlock", "wake", "walk",
    "warm", "wash", "water", "write",
}  # fmt: skip
ORDERS = (
    "{}", "{}", "{}!", "{} please", "please {}", "{}, thanks", "could you {}", "could you {} for me",
    "can you please {}", "hey, {}", "would you {}", "ok, now {}", "quick, {}",
)  # fmt: skip
REMARKS = ("{}", "{}", "{}!", "{}, please", "hey, {}", "ok, {}", "{}, thanks", "hello, {}")


def all_commands() -> Iterator[Command]:
    """Return all commands for one room, door or timer."""
    for room in ROOMS:
        for device, action in PHRASES:
            if device not in ("door", "timer") and action not in ("set", "play"):
                yield {"room": room, "device": device, "action": action}
        for percent, device in product(PERCENTS, ("lamp", "blinds", "speaker")):
            yield {"room": room, "device": device, "action": "set", "value": percent}
        for degrees in DEGREES:
            yield {"room": room, "device": "heater", "action": "set", "value": degrees}
        for music in MUSIC:
            yield {"room": room, "device": "speaker", "action": "play", "value": music}
    for door, action in product(("front", "back", "side", "cellar", "garage"), ("lock", "unlock")):
        yield {"room": door, "device": "door", "action": action}
    for minutes in MINUTES:
        yield {"device": "timer", "action": "set", "value": minutes}


def request(command: Command, draw: random.Random) -> str:
    """Return one way to ask for a command."""
    phrase = draw.choice(PHRASES[command["device"], command["action"]])
    value = command.get("value")
    if value in WORDS and "{value}%" not in phrase and draw.random() < 0.4:
        value = WORDS[value]
    return phrase.format(room=command.get("room"), value=value)


def typed(text: str, draw: random.Random) -> str:
    """Return the request as people type it: more or less polite, sometimes with two letters swapped."""
    text = draw.choice(ORDERS if text.split()[0] in IMPERATIVES else REMARKS).format(text)
    if draw.random() < 0.07:
        place = draw.choice([i for i in range(len(text) - 1) if text[i : i + 2].isalpha()])
        text = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    return text[0].upper() + text[1:] if draw.random() < 0.5 else text


def rows(train: int, validation: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return two lists of (request, command) that share neither a command nor an unsupported request."""
    draw = random.Random(seed)
    kinds: dict[tuple[str, str], list[Command]] = {}
    for command in all_commands():
        kinds.setdefault((command["device"], command["action"]), []).append(command)
    held_out = [
        commands.pop(draw.randrange(len(commands)))
        for commands in kinds.values()
        for _ in range(len(commands) // 6 or 1)
    ]
    refused = draw.sample(UNSUPPORTED, len(UNSUPPORTED))
    unseen = validation // 6

    answers = [(request(command, draw), command) for command in draw.sample(held_out, validation - unseen)]
    answers += [(text, REFUSAL) for text in refused[:unseen]]
    draw.shuffle(answers)
    questions: dict[str, Command] = {}
    while len(questions) < train:
        kind = draw.randrange(len(kinds) + 3)  # each kind of command as often as the other
        if kind < len(kinds):
            command = draw.choice(list(kinds.values())[kind])
            text = request(command, draw)
        elif kind == len(kinds):
            command, phrases = draw.choice(HOUSEHOLD)
            text = draw.choice(phrases)
        else:
            command, text = REFUSAL, draw.choice(refused[unseen:])
        questions.setdefault(typed(text, draw), command)
    return list(questions.items()), [(typed(text, draw), command) for text, command in answers]


def write(path: Path, pairs: list[Pair]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for text, command in pairs:
            answer = json.dumps(command, separators=(",", ":"))
            roles = {"system": SYSTEM, "user": text, "assistant": answer}
            messages = [{"role": role, "content": content} for role, content in roles.items()]
            print(json.dumps({"messages": messages}), file=stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder to write to")
    parser.add_argument("--train", type=int, default=700, help="number of training rows")
    parser.add_argument("--validation", type=int, default=60, help="number of validation rows")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, validation = rows(options.train, options.validation, options.seed)
    write(options.out / "train.jsonl", train)
    write(options.out / "validation.jsonl", validation)


if __name__ == "__main__":
    main()
