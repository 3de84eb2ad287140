# ruff: noqa: RUF001
"""Strings that tokenizers often get wrong, and conversations that templates often get wrong."""

import random

SCRIPTS = """
The quick brown fox jumps over the lazy dog. It's what they'll say; I'D bet you've heard: DON'T!
Größenwahn, naïve café, œuvre, Ærøskøbing, İstanbul'da ığdır, Żółć gęślą jaźń, Đặng Thị Hồng, cafe\u0301 = café
Съешь же ещё этих мягких французских булок; Ґанок; Ѹ; Љубав и мир.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ἀρχῇ
שלום עולם, שָׁלוֹם! 123 אבג \u200fRTL\u200e
مرحبا بالعالم، كيف الحال؟ ١٢٣ بِسْمِ ٱللَّهِ
नमस्ते दुनिया, क्षत्रिय, हिन्दी १२३ · বাংলা ভাষা · தமிழ் · తెలుగు · ಕನ್ನಡ · മലയാളം · සිංහල
สวัสดีชาวโลก ๑๒๓ · ສະບາຍດີ · မင်္ဂလာပါ · សួស្តី
你好，世界！天地玄黃，宇宙洪荒。これはテストです。カタカナ ﾊﾝｶｸ 안녕하세요 세계, 한글\u1112\u1161\u11ab
Բարեւ աշխարհ · გამარჯობა · ሰላም ልዑል · ᏣᎳᎩ · ᠮᠣᠩᠭᠣᠯ · ⵜⴰⵎⴰⵣⵉⵖⵜ · བོད་སྐད་ · 𐎠𐎡𐎢 · 𒀀𒁀 · 𓀀𓁐
""".strip().splitlines()
EMOJI = [
    "🦊",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👍🏽",
    "🇩🇪🇫🇷",
    "❤️‍🔥",
    "1️⃣",
    "☺",
    "🧑🏿‍🚀",
    "🫠",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
]
SPACES = [
    " ",
    "  ",
    "   ",
    " " * 7,
    " " * 16,
    " " * 40,
    "\n",
    "\n\n",
    "\n" * 5,
    "\r\n",
    "\t",
    "\t\t\t",
    " \n ",
    "\n \n",
    "\r",
]
SPACES += [
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u2028",
    "\u2029",
    "\x0b",
    "\x0c",
    "\x85",
    "\u200b",
    "\ufeff",
    "\u180e",
    "\u1680",
]
CONTROL = [
    "\x00",
    "\x01",
    "\x07",
    "\x08",
    "\x1b[0m",
    "\x7f",
    "\x80",
    "\x9f",
    "\u202e",
    "\ufffd",
    "\ufffe",
    "\uffff",
    "\U0010ffff",
    "\ue000",
]
CODE = [
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\nprint(f(10_000))\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i] * b[i];\n\t}\n",
    '{"a": [1, 2.5e-3, null], "b": {"c": "\\u00e9\\n"}}',
    "SELECT * FROM t WHERE id IN (1,2,3) -- comment;",
    "<div class='x'>&nbsp;</div>\\begin{align} \\alpha &= 1 \\\\ \\end{align}",
    "===== ---- ____ **** #### ...... !!!!!!! ???? //// \\\\\\\\ ~~~~ ''' \"\"\" ```",
    "0x1F600 0b1010 1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣ １２３ 5'10\"",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\Windows\\",
]
SPECIAL = [
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|reserved_special_token_5|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<0x0A>",
    "<|im_start",
    "▁",
    "▁▁a",
    "Ġ",
    "<SPECIAL_20>",
    "<think>",
    "<tool_call>",
]  # fmt: skip
RUNS = ["a", "ab", "aaa", "-", "=", "ha", "\n", " ", "1", "ß", "é", "你", "🦊", "e\u0301", "...", "#", "the the "]


def texts(count: int, seed: int = 0) -> list[str]:
    """Return the same strings each time: each kind alone, runs, and mixtures of all kinds."""
    draw = random.Random(seed)
    words = [word for line in SCRIPTS for word in line.split(" ")]
    kinds = [words, words, words, EMOJI, SPACES, SPACES, CONTROL, CODE, SPECIAL]
    found = ["", *SCRIPTS, *EMOJI, *SPACES, *CONTROL, *CODE, *SPECIAL]
    found += [f" {text}" for text in words] + [f"{text} " for text in SPECIAL] + [f"  {text}" for text in SPECIAL]
    found += [text * times for text in RUNS for times in (2, 3, 4, 5, 7, 8, 13, 17, 33)]
    found += ["".join(chr(draw.randrange(1, 0xD800)) for _ in range(20)) for _ in range(count // 40)]
    while len(found) < count:
        pieces = [draw.choice(draw.choice(kinds)) for _ in range(draw.randint(2, 12))]
        found.append(draw.choice(["", " "]).join(pieces))
    return found[:count]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says how the <b>weather</b> & "wind" are, in °C.\nAnywhere.',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A town, as in Zürich"},
                    "days": {"type": "integer", "enum": [1, 3, 7]},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object"}}},
]
DOCUMENTS = [{"title": "Foxes", "text": "A fox is quick; it's <i>brown</i>."}, {"title": "Hunde", "text": "Faul 🐶."}]


def conversations(count: int, seed: int = 0) -> list[dict]:
    """Return arguments for `apply_chat_template`: systems, tools, documents, many turns, empty contents, answers."""
    draw = random.Random(seed)
    contents = [text for text in texts(400, seed) if "\ufdd0" not in text]
    found = []
    for number in range(count):
        messages = []
        if draw.random() < 0.4:
            messages.append({"role": draw.choice(["system"] * 9 + ["developer"]), "content": draw.choice(contents)})
        tools = TOOLS if draw.random() < 0.35 else None
        for _ in range(draw.choice([1, 1, 2, 2, 3, 5])):
            messages.append({"role": "user", "content": draw.choice(["", "Hi", *contents])})
            if tools and draw.random() < 0.6:
                call = {"name": "weather", "arguments": {"place": draw.choice(contents), "days": 3}}
                identity = f"call{number:05d}"
                calls = [{"id": identity, "type": "function", "function": call}]
                said = draw.choice([{}, {"content": None}, {"content": ""}, {"content": "Let me see."}])
                messages.append({"role": "assistant", **said, "tool_calls": calls})
                answer = '{"degrees": 12}'
                messages.append({"role": "tool", "name": "weather", "tool_call_id": identity, "content": answer})
            answer = {"role": "assistant", "content": draw.choice(["", "Hello!", *contents])}
            if draw.random() < 0.2:
                answer["content"] = f"<think>\n{draw.choice(contents)}\n</think>\n\n{answer['content']}"
            elif draw.random() < 0.2:
                answer[draw.choice(["reasoning_content", "thinking", "reasoning"])] = draw.choice(contents)
            messages.append(answer)
        if draw.random() < 0.4:
            messages.pop()
        variables = draw.choice([{}, {}, {}, {"enable_thinking": False}, {"enable_thinking": True}])
        documents = DOCUMENTS if draw.random() < 0.1 else None
        prompt = messages[-1]["role"] != "assistant" and draw.random() < 0.8
        found.append(
            {"messages": messages, "tools": tools, "documents": documents, "add_generation_prompt": prompt, **variables}
        )
    return found
