"""A rule, and what it finds."""

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import OmegaConf

from tune.rules.facts import Facts


class Level(enum.StrEnum):
    """`ERROR`: the run would fail or learn nothing. `HEAL`: a setting is changed. `WARN`: seldom what was meant."""

    ERROR = "error"
    HEAL = "heal"
    WARN = "warn"


@dataclass(frozen=True)
class Finding:
    """Something wrong at a `place`: a setting, or a file. `rule` and `link` are those of a rule, else empty."""

    level: Level
    place: str
    message: str
    rule: str = ""
    link: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """`key` is the setting to blame; `says` what is wrong with it and what to do, with its value for `{}`; `why` what
    it costs. `source` is an upstream thread (owner/name#number), `since` the version that has had it since then.
    `to` is the value that heals it."""

    id: str
    level: Level
    key: str
    source: str
    since: str
    says: str
    why: str
    when: Callable[[Facts], Any]
    to: Any = None

    @property
    def link(self) -> str:
        """The thread's address; GitHub sends it on to a pull request's."""
        name, _, number = self.source.partition("#")
        return f"https://github.com/{name}/issues/{number}"

    def judge(self, facts: Facts, strict: bool = False) -> Finding | None:
        """The finding if it holds; a healing rule then changes the setting, unless `strict`."""
        if not self.when(facts):
            return None
        message, level = self.says.format(facts(self.key)), self.level
        if level is Level.HEAL:
            if strict:
                level = Level.ERROR
            else:
                OmegaConf.update(facts.cfg, self.key, self.to)
        return Finding(level, self.key, f"{message}: {self.why}", self.id, self.link)
