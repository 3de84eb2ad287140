"""The texts of the beginnings of a conversation."""

from functools import cached_property
from typing import Any

from tune.tokenizers.chat_template import ChatTemplate, Message, Span
from tune.tokenizers.steps import StepwiseText

# Replaces a conversation's missing first question.
_QUESTION: Message = {"role": "user", "content": "Hello"}


class Beginnings:
    """Renders the beginnings of a conversation, as `template.render(messages[:end], ...)` does.

    If the template writes one message after another, all beginnings together need one rendering.
    """

    def __init__(
        self, template: ChatTemplate, messages: list[Message], tools: list | None = None, **variables: Any
    ) -> None:
        self.template = template
        self.messages = [of_template(message) for message in messages]
        self._tools = tools
        self._variables = variables
        self._asked_at: int | None = None
        self._steps: dict[tuple, StepwiseText | None] = {}
        answers = [message for message in messages if message["role"] == "assistant"]
        # For one answer, the text and its prompt are two renderings in any way.
        self._in_steps = len(answers) > 1

    @cached_property
    def asked(self) -> "Beginnings":
        """The conversation with a question before its first answer, if that stands first. `end` counts as without it.

        Many templates cannot render a conversation without messages before the first answer. With a question added
        before it, the answer has the same text and the same distance from the end.
        """
        roles = [message["role"] for message in self.messages]
        first = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), None)
        if first is None or roles[first] != "assistant":
            return self
        messages = [*self.messages[:first], _QUESTION, *self.messages[first:]]
        asked = Beginnings(self.template, messages, self._tools, **self._variables)
        asked._asked_at = first
        return asked

    def render(self, end: int, add_generation_prompt: bool = False, **variables: Any) -> str:
        """The text of `messages[:end]`. Raises TuneError if the template rejects it."""
        return self.render_with_spans(end, add_generation_prompt, **variables)[0]

    def render_with_spans(
        self, end: int, add_generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[Span]]:
        """The text of `messages[:end]`, and the spans of the template's `{% generation %}` blocks."""
        end += self._asked_at is not None
        marked = None
        # If the template marks answers, the whole text is often all that is needed.
        needs_steps = end < len(self.messages) or not self.template.marks_generation or self._steps
        if self._in_steps and needs_steps:
            steps = self._rendered_in_steps(add_generation_prompt, variables)
            marked = steps.beginning(end) if steps else None
        if marked is not None:
            return self.template.without_marks(marked)
        return self.template.render_with_spans(
            self.messages[:end], add_generation_prompt, tools=self._tools, **self._variables, **variables
        )

    def render_changed(self, messages: list[Message]) -> str:
        """The text of other messages with the same tools, and the same question before the first answer."""
        if self._asked_at is not None:
            messages = [*messages[: self._asked_at], _QUESTION, *messages[self._asked_at :]]
        return self.template.render(messages, tools=self._tools, **self._variables)

    def _rendered_in_steps(self, add_generation_prompt: bool, variables: dict[str, Any]) -> StepwiseText | None:
        key = (add_generation_prompt, *variables.items())
        if key not in self._steps:
            self._steps[key] = self.template.render_in_steps(
                self.messages, add_generation_prompt, tools=self._tools, **self._variables, **variables
            )
            if self._steps[key] is None:
                self._in_steps = False
        return self._steps[key]


def of_template(message: Message) -> Message:
    """The message as templates see it: they write a mark for each picture, whose file is not theirs to read."""
    return {key: value for key, value in message.items() if key not in ("train", "pictures")}
