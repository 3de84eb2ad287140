"""The tokenizer of a checkpoint folder."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tune.errors import TuneError, explained
from tune.files import require_inside
from tune.lookup import in_shell, local_path
from tune.tokenizers.beginnings import Beginnings
from tune.tokenizers.chat_template import SHIPPED, ChatTemplate, Message, Span, chosen_template, markers
from tune.tokenizers.encoded import Borders, Encoded
from tune.tokenizers.folder import SOURCES, mapping_in, read_vocabulary
from tune.tokenizers.picture_processor import PROCESSOR_FILES, PictureProcessor, has_processor
from tune.tokenizers.supervision import end_of_turn, require_asked, supervised_spans

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "vocab.json", "merges.txt", *SOURCES, *PROCESSOR_FILES,
)  # fmt: skip
CLEAN = "clean_up_tokenization_spaces"
# transformers' replacements, in this order.
CLEANED = {
    " .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " 's": "'s", " 've": "'ve",
    " 're": "'re",
}  # fmt: skip


class Tokenizer:
    """The tokenizer and chat template of a checkpoint folder. Ids and texts are the same as in transformers.

    `bos_id`, `eos_id` and `pad_id` are None if the folder defines no such token. Special tokens spelled out in a text
    are encoded as special tokens. Raises TuneError for a folder without a readable vocabulary; docs/tokenizers.md lists
    the supported kinds.

    `chat_template` (a name of `SHIPPED`, or a file) and `eos_token` replace the folder's own, and are saved. `date` is
    the date that templates print as today; None is the current date, with which texts change from day to day.
    """

    def __init__(
        self,
        path: str | Path,
        chat_template: str | None = None,
        eos_token: str | None = None,
        date: str | None = "2024-07-26",  # transformers' templates print it if they are given no clock
    ) -> None:
        if not isinstance(path, str | Path):
            raise TuneError(
                f"path: {type(path).__name__} is not a folder. For a transformers tokenizer, use Tokenizer.of(...)"
            )
        self.path = local_path(path)
        with explained(f"tokenizer.date={date} is not a date such as 2024-07-26", ValueError):
            self._date = datetime.fromisoformat(date) if date else None
        self._source, self._tokenizer, self.special_tokens = read_vocabulary(self.path)
        config = mapping_in(self.path / "tokenizer_config.json")
        byte_pairs = isinstance(self._tokenizer.model, tokenizers.models.BPE)  # keeps spaces, as in transformers
        even_byte_pairs = config.get(f"{CLEAN}_for_bpe_even_though_it_will_corrupt_output")
        self._cleans = bool(config.get(CLEAN)) and bool(even_byte_pairs or not byte_pairs)
        self._added: dict[int, AddedToken] = {}
        self._folder: Any = None
        configs = (self.path / name for name in ("generation_config.json", "config.json"))
        self._generation_eos = next(filter(None, map(_eos_ids, configs)), [])
        if "eos_token" not in self.special_tokens and self._generation_eos:
            configured = self._tokenizer.id_to_token(self._generation_eos[0])
            self.special_tokens |= {"eos_token": configured} if configured else {}
        self._chosen: dict[str, str] = {}  # chosen settings, which are saved
        if eos_token is not None:
            self._make_special([eos_token], f"tokenizer.eos_token={eos_token}")
            self._chosen["eos_token"] = self.special_tokens["eos_token"] = eos_token
        ids = {name: self._tokenizer.token_to_id(token) for name, token in self.special_tokens.items()}
        self.bos_id, self.eos_id, self.pad_id = map(ids.get, ("bos_token", "eos_token", "pad_token"))
        if chat_template is None:
            self._templates = self._read_templates()
        else:
            self._chosen["chat_template"] = self._choose(chat_template)
            self._templates = {"default": self._chosen["chat_template"]}

    @classmethod
    def of(cls, tokenizer: Any, **options: Any) -> "Tokenizer":
        """Convert a transformers tokenizer, with its added tokens and chat template.

        It is saved to a temporary folder, which exists as long as the result. `options` are arguments of `Tokenizer`.

        Raises:
            TuneError: `tokenizer` is not a transformers tokenizer, or its vocabulary cannot be read.
        """
        if not hasattr(tokenizer, "save_pretrained"):
            instead = " For a folder, use Tokenizer(path)" if isinstance(tokenizer, str | Path) else ""
            raise TuneError(f"Tokenizer.of: {type(tokenizer).__name__} is not a transformers tokenizer.{instead}")
        folder = tempfile.TemporaryDirectory(prefix="tokenizer-")
        tokenizer.save_pretrained(folder.name)
        made = cls(folder.name, **options)
        made._folder = folder
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The state without compiled templates, which cannot be pickled, and the temporary folder of this process."""
        return {name: value for name, value in vars(self).items() if name not in ("_compiled", "_folder")}

    @property
    def vocab_size(self) -> int:
        """The number of rows that an embedding needs: the highest id plus one."""
        return max(self.vocabulary.values()) + 1

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, added ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def require_same_ids(self, other: "Tokenizer", setting: str) -> None:
        """Raise TuneError, which names `setting`, if an id is a different token in `other`."""
        ours, theirs = ({index: token for token, index in each.vocabulary.items()} for each in (self, other))
        if differing := sorted(index for index in ours.keys() | theirs if ours.get(index) != theirs.get(index)):
            examples = ", ".join(f"{at} ({ours.get(at)!r} and {theirs.get(at)!r})" for at in differing[:3])
            raise TuneError(
                f"{setting}: {other.path} has a different tokenizer from {self.path}: {len(differing):,} ids differ, "
                f"such as {examples}. Only predictions over the same tokens can be compared. Use models of one family"
            )

    @property
    def definition(self) -> dict[str, Any]:
        """The content of its tokenizer.json."""
        return json.loads(self._tokenizer.to_str())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines ids, the text of conversations and where an answer ends."""
        ends = sorted(self._generation_eos)
        contents = [tokenizers.__version__, self._tokenizer.to_str(), self.special_tokens, self._templates, ends]
        if any("strftime_now" in template for template in self._templates.values()):
            contents.append(str(self._date))
        if self.pictures:
            contents.append(self.pictures.fingerprint)
        return hashlib.blake2b(json.dumps(contents, sort_keys=True).encode(), digest_size=16).hexdigest()

    @cached_property
    def pictures(self) -> PictureProcessor | None:
        """The processor of pictures in the folder; None if it reads only text."""
        return PictureProcessor(self.path) if has_processor(self.path) else None

    @cached_property
    def stop_ids(self) -> set[int]:
        """Tokens that end an answer: EOS, those of generation_config.json, and the chat template's end of turn."""
        ids = set(self._generation_eos)
        if self.eos_id is not None:
            ids.add(self.eos_id)
        token = end_of_turn(self.apply_chat_template, self._special_pattern)
        return ids | set(self.encode(token)) if token else ids

    def choose_pad(self) -> int:
        """Choose a pad token that does not end texts, and return its id; `save` writes it.

        It is the folder's own pad token, or another special token if there is none or if it ends texts: transformers
        scores a text at its last token that is not a pad token.
        """
        end = end_of_turn(self.apply_chat_template, self._special_pattern) if self.chat_template else None
        ends = {self.eos_id, *(self.encode(end) if end else [])}
        if self.pad_id is None or self.pad_id in ends:
            others = [index for index in self.special_ids if index not in ends]
            if not others:
                command = f"tune add-tokens {in_shell(self.path)} OUT '<|pad|>'"
                raise TuneError(
                    f"the tokenizer in {self.path} has no special token for padding, only tokens that end texts. Add "
                    f"one, and train the resulting model: {command}"
                )
            self.pad_id = min(others, key=lambda index: ("pad" not in self.special_ids[index].lower(), index))
        self._chosen["pad_token"] = str(self._tokenizer.id_to_token(self.pad_id))
        return self.pad_id

    @cached_property
    def prefix_ids(self) -> list[int]:
        """The tokens that precede a plain text: BOS, or none."""
        bare, full = self.encode("a"), self.encode("a", add_special_tokens=True)
        return next(full[:at] for at in range(len(full)) if full[at : at + len(bare)] == bare)

    def encode(self, text: str, add_special_tokens: bool = False, parse_special_tokens: bool = True) -> list[int]:
        """Encode a text. `add_special_tokens` adds BOS (and EOS) as the folder configures.

        With `parse_special_tokens=False`, spelled-out special tokens are plain text, so a text cannot end a turn.
        """
        require_unicode(text)
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        finally:
            self._tokenizer.encode_special_tokens = False

    def encode_with_offsets(self, texts: list[str]) -> list[tokenizers.Encoding]:
        """Encode a batch of texts on all cores, without `prefix_ids`."""
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def encode_groups(self, groups: list[list[str]]) -> list[list[Encoded]]:
        """Encode groups of texts, without `prefix_ids`. What a text shares with the text before it in its group is not
        tokenized again."""
        cuts = [[0, *(self._borders.cut(text, before) for before, text in pairwise(group))] for group in groups]
        rests = [
            text[cut:]
            for group, cuts_of_group in zip(groups, cuts, strict=True)
            for text, cut in zip(group, cuts_of_group, strict=False)
        ]
        encodings = iter(self.encode_with_offsets(rests))
        encoded_groups = []
        for group, cuts_of_group in zip(groups, cuts, strict=True):
            encoded_group: list[Encoded] = []
            for text, cut in zip(group, cuts_of_group, strict=False):
                encoding = next(encodings)
                before = encoded_group[-1] if cut else None
                encoded_group.append(self._joined(text, cut, encoding, before) if before else Encoded(encoding))
            encoded_groups.append(encoded_group)
        return encoded_groups

    def encode_like(self, text: str, before: str, encoded: Encoded) -> Encoded:
        """Encode a text, without `prefix_ids`. What it shares with the text `before`, which is encoded, is not
        tokenized again."""
        cut = self._borders.cut(text, before)
        (encoding,) = self.encode_with_offsets([text[cut:]])
        return self._joined(text, cut, encoding, encoded) if cut else Encoded(encoding)

    def _joined(self, text: str, cut: int, rest: tokenizers.Encoding, before: Encoded) -> Encoded:
        joined = self._borders.joined(before, text, cut, rest)
        return joined or Encoded(self.encode_with_offsets([text])[0])

    @cached_property
    def _borders(self) -> Borders:
        return Borders(self._tokenizer)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return _cleaned(text) if self._cleans else text

    def stream(self, skip_special_tokens: bool = False) -> "TextStream":
        """Return a decoder for tokens that are generated one by one."""
        return TextStream(partial(self.decode, skip_special_tokens=skip_special_tokens))

    def add_tokens(self, tokens: Iterable[str], special: bool = True) -> list[int]:
        """Add missing tokens at the end of the vocabulary, and return the ids of all `tokens`. `save` writes them.

        The model then needs `vocab_size` rows in its embedding and head. `decode(..., skip_special_tokens=True)` leaves
        out special tokens.
        """
        ids = []
        for token in tokens:
            if not token.strip():
                raise TuneError(f"{token!r} cannot be added to the tokenizer: a token cannot be blank")
            token_id = self._tokenizer.token_to_id(token)
            if token_id is None:
                added = AddedToken(token, special=special, normalized=False)
                token_id = self.vocab_size
                self._reserve(token, token_id)
                self._tokenizer.add_tokens([added])
                self._added[token_id] = added
            ids.append(token_id)
        for name in ("_special_pattern", "_borders"):
            self.__dict__.pop(name, None)
        return ids

    def _reserve(self, token: str, token_id: int) -> None:
        """Give a new `token` its id in a vocabulary with unused ids: the library counts the tokens, and would take the
        id of another one."""
        if len(self.vocabulary) == token_id:
            return
        state = json.loads(self._tokenizer.to_str())
        vocabulary = state["model"]["vocab"]
        if not isinstance(vocabulary, dict):  # a list has no holes, and may have one token twice
            return
        vocabulary |= {added["content"]: added["id"] for added in state["added_tokens"]}
        vocabulary[token] = token_id
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    def apply_chat_template(
        self, messages: list[Message], add_generation_prompt: bool = False, tools: list | None = None, **variables: Any
    ) -> str:
        """Render a conversation as text, with the template `tool_use` if there is one and `tools` are given.

        `tools` are JSON schemas. `variables` go to the template, such as `documents` or `enable_thinking=False`.
        """
        return self._template(tools).render(messages, add_generation_prompt, tools=tools, **self._clock, **variables)

    def beginnings(self, messages: list[Message], tools: list | None = None) -> Beginnings:
        """The texts of the beginnings of a conversation, for `supervised_spans` and `require_asked`."""
        return Beginnings(self._template(tools), messages, tools, **self._clock)

    def supervised_spans(
        self, messages: list[Message], tools: list | None = None, beginnings: Beginnings | None = None
    ) -> tuple[str, list[Span]]:
        """The conversation as text and its supervised character spans; see `tune.tokenizers.supervised_spans`."""
        return supervised_spans(
            self._template(tools), messages, self._special_pattern, tools, beginnings, **self._clock
        )

    def require_asked(self, messages: list[Message], text: str, beginnings: Beginnings) -> None:
        """Raise TuneError unless `text`, the rendered conversation, is how the model is asked for its last message.

        `beginnings` are those of a conversation that begins with `messages`."""
        require_asked(beginnings, messages, text)

    @property
    def _clock(self) -> dict[str, Any]:
        """The function that templates call for the date."""
        return {"strftime_now": self._date.strftime} if self._date else {}

    def ends_turn(self, text: str) -> bool:
        """Whether `text` ends with a special token, apart from whitespace."""
        text = text.rstrip()
        return any(match.end() == len(text) for match in self._special_pattern.finditer(text))

    def special_tokens_in(self, text: str) -> list[str]:
        """Special tokens that are spelled out in a text."""
        return self._special_pattern.findall(text)

    def save(self, folder: str | Path) -> None:
        """Copy the tokenizer's files byte for byte, except for added tokens and a chosen template, EOS or pad token.

        A folder without tokenizer.json gets one, and a config that uses it, since versions of transformers read other
        vocabularies differently. If `folder` has config.json or generation_config.json, `stop_ids` are added to its
        `eos_token_id`, so that a base model that has learned to chat stops at the end of a turn.
        """
        folder, chosen = Path(folder), self._chosen
        for file in (file for name in FILES for file in self.path.glob(name) if file.is_file()):
            if self._added and (file.name == "tekken.json" or file.suffix == ".tiktoken"):
                continue  # cannot hold added tokens: tokenizer.json takes its place
            if "chat_template" in chosen and file.suffix == ".jinja":
                continue
            target = folder / file.relative_to(self.path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(require_inside(file), target)
        if self._added or self._source.name != "tokenizer.json":
            content = self.definition
            if self._source.name == "tokenizer.json":  # the loaded tokenizer has truncation and padding off
                source = mapping_in(self._source)
                model = source["model"] | {"vocab": content["model"]["vocab"]}
                content = source | {"added_tokens": content["added_tokens"], "model": model}
            _update(folder / "tokenizer.json", content)
        config = mapping_in(folder / "tokenizer_config.json")
        if self._source.name != "tokenizer.json":
            config |= {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if "added_tokens_decoder" in config:
            flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
            for index, token in self._added.items():
                config["added_tokens_decoder"][str(index)] = {name: getattr(token, name) for name in flags}
        if "chat_template" in chosen:
            config.pop("chat_template", None)
            (folder / "chat_template.jinja").write_text(chosen["chat_template"], encoding="utf-8")
        tokens = {name: token for name, token in chosen.items() if name != "chat_template"}
        config |= tokens
        if tokens and (named := mapping_in(folder / "special_tokens_map.json")):
            _update(folder / "special_tokens_map.json", named | tokens)
        _update(folder / "tokenizer_config.json", config)
        if listed := mapping_in(folder / "added_tokens.json"):
            _update(folder / "added_tokens.json", listed | {token.content: at for at, token in self._added.items()})
        for name in ("config.json", "generation_config.json"):
            if (folder / name).exists():
                self._save_stop_ids(folder / name)

    def _save_stop_ids(self, file: Path) -> None:
        config = mapping_in(file)
        parts = [part for part in (config, config.get("text_config")) if part and "eos_token_id" in part] or [config]
        for part in parts:
            there = _listed(part.get("eos_token_id"))
            if missing := sorted(self.stop_ids - {*there}):
                ids = [*there, *missing]
                part["eos_token_id"] = ids if len(ids) > 1 else ids[0]
        _update(file, config)

    @property
    def special_ids(self) -> dict[int, str]:
        """All special tokens by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {index: token.content for index, token in added.items() if token.special}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        special = sorted(self.special_ids.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, special)) or "(?!)")

    def require_chat_template(self) -> None:
        """Raise TuneError if there is no chat template."""
        if self.chat_template is None:
            raise TuneError(
                f"the tokenizer in {self.path} has no chat template, which conversations need. Copy "
                "chat_template.jinja from the model's chat version there (`tune generate --raw` needs none). In a "
                f"recipe, you can also set tokenizer.chat_template to {self._fitting()} (whose tokens it has) or to a "
                "template file, or use a dataset of prompt and completion"
            )

    def _fitting(self) -> str:
        """The library's templates whose special tokens are in the vocabulary."""
        return ", ".join(name for name, needed in SHIPPED.items() if self.vocabulary.keys() >= needed)

    def _choose(self, name: str) -> str:
        """The template that the setting names. Raises TuneError if it does not exist or needs missing tokens."""
        source, setting = chosen_template(name), f"tokenizer.chat_template={name}"
        if name in SHIPPED and self.bos_id is not None and self.prefix_ids == [self.bos_id]:
            source = "{{ bos_token }}" + source
        if "eos_token" in source and self.eos_id is None:
            raise TuneError(f"{setting} uses eos_token, but {self.path} defines none. Set tokenizer.eos_token")
        self._make_special(markers(ChatTemplate(source, self.special_tokens, setting)), setting)
        return source

    def _make_special(self, tokens: list[str], setting: str) -> None:
        """Make tokens of the vocabulary special. Raises TuneError for tokens that are missing from it."""
        if missing := [token for token in tokens if token not in self.vocabulary]:
            names = " ".join(map(repr, missing))
            raise TuneError(
                f"{setting}: the tokenizer in {self.path} has no token {', '.join(map(repr, missing))}. Choose one of "
                f"{self._fitting()}, whose tokens it has, or add the tokens to the base: `tune add-tokens {self.path} "
                f"OUT {names}`. Then train their rows, in a full fine-tune or with adapter.trainable_tokens"
            )
        decoder = self._tokenizer.get_added_tokens_decoder()
        for index in (self.vocabulary[token] for token in tokens):
            if index not in decoder or not decoder[index].special:
                self._added[index] = AddedToken(self._tokenizer.id_to_token(index), special=True, normalized=False)
                self._tokenizer.add_special_tokens([self._added[index]])

    def _template(self, tools: list | None) -> ChatTemplate:
        self.require_chat_template()
        return self._compiled["tool_use" if tools is not None and "tool_use" in self._templates else "default"]

    @cached_property
    def _compiled(self) -> dict[str, ChatTemplate]:
        origin = "tokenizer.chat_template" if "chat_template" in self._chosen else f"the chat template in {self.path}"
        return {name: ChatTemplate(text, self.special_tokens, origin) for name, text in self._templates.items()}

    def _read_templates(self) -> dict[str, str]:
        files = {file.stem: file for file in sorted(self.path.glob("additional_chat_templates/*.jinja"))}
        if (file := self.path / "chat_template.jinja").is_file():
            files["default"] = file
        meant = "must be a text, or a list of named texts"
        with explained(f"the chat template in {self.path} {meant}; it cannot be read", Exception):
            if files:
                return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
            configured = mapping_in(self.path / "tokenizer_config.json").get("chat_template") or []
            named = configured if isinstance(configured, list) else [{"name": "default", "template": configured}]
            templates = {entry["name"]: entry["template"] for entry in named}
            if not all(isinstance(template, str) for template in templates.values()):
                raise TypeError(f"found {configured!r}")
            return templates


class TextStream:
    """Decode tokens as they arrive: `add` returns new text in complete characters, `finish` the rest."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # of the last `add`: context for tokens that decode differently at the start of a text
        self._given = 0

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._rest()
        if text.endswith("\ufffd"):  # an incomplete character of several tokens
            return ""
        self._start, self._given = self._given, len(self._ids)
        return text

    def finish(self) -> str:
        text = self._rest()
        self._start = self._given = len(self._ids)
        return text

    def _rest(self) -> str:
        before = self._decode(self._ids[self._start : self._given])
        return self._decode(self._ids[self._start :])[len(before) :]


def require_ours(tokenizer: Any) -> None:
    """Raise TuneError for a transformers tokenizer."""
    if hasattr(tokenizer, "save_pretrained"):
        raise TuneError(
            f"tokenizer: {type(tokenizer).__name__} is a transformers tokenizer. Pass Tokenizer.of(tokenizer)"
        )


def require_unicode(text: str) -> None:
    """Raise TuneError for text that UTF-8 cannot encode."""
    what = "the text holds half of a character pair (a lone \\ud800-\\udfff escape), or bytes that are not UTF-8"
    with explained(what, UnicodeEncodeError):
        text.encode()


def _cleaned(text: str) -> str:
    for spaced, joined in CLEANED.items():
        text = text.replace(spaced, joined)
    return text


def _eos_ids(file: Path) -> list[int]:
    """Return `eos_token_id` of a config file as a list. Raises TuneError if it is anything but token ids."""
    ids = _listed(mapping_in(file).get("eos_token_id"))
    if any(type(each) is not int or each < 0 for each in ids):
        raise TuneError(f"{file}: eos_token_id is {ids}; it must be a token id, or a list of token ids")
    return ids


def _listed(ids: int | list[int] | None) -> list[int]:
    if isinstance(ids, list):
        return ids
    return [] if ids is None else [ids]


def _update(file: Path, content: dict[str, Any]) -> None:
    """Write the file unless it already has this content, so that a copied file stays as it is, byte for byte."""
    if content != mapping_in(file):
        file.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
