"""The engine's tokenizer over the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import TokenizeError
from ...tokenizer import Message
from .chat import ChatTemplate
from .vocabulary import build_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


class HFTokenizer:
    """Implements ``asyncsched.tokenizer.Tokenizer``. Any thread; keeps no state between calls.

    Args:
        tokenizer: Truncation and padding are switched off.
        eos_ids: Token ids that end a generation.
        chat: The model's chat templates.

    Raises:
        UnsupportedModelError: its tokens cannot be decoded one by one.
    """

    def __init__(self, tokenizer: Library, *, eos_ids: tuple[int, ...], chat: ChatTemplate) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._vocabulary = build_vocabulary(tokenizer)
        self._eos_ids = eos_ids
        self._chat = chat

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation."""
        return self._eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Token ids that ``skip_special_tokens`` leaves out of the text."""
        return self._vocabulary.special_ids

    @property
    def longest_token(self) -> int:
        """Most characters one token can stand for; ``sys.maxsize`` if the tokenizer shortens text first.

        Characters for which the vocabulary has no token at all (a few control characters, if any) count
        as text here although encoding drops them.
        """
        return self._vocabulary.longest_token

    @property
    def strips_leading_space(self) -> bool:
        """True if decoding drops one space at the very start of a text."""
        return self._vocabulary.strips_leading_space

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, limit: int) -> list[list[int] | int]:
        """Ids of each text, or their number where it is over ``limit``. Releases the GIL meanwhile.

        Raises:
            TokenizeError: a text cannot be encoded (a lone surrogate, say); the cause is chained.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:
            raise TokenizeError(_complaint(texts, error)) from error
        # ``ids`` builds a list under the GIL: tens of milliseconds for a million tokens nobody will use.
        return [len(encoding) if len(encoding) > limit else encoding.ids for encoding in encodings]

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token contributes to the text; none for ids without a token (padded vocabularies)."""
        table = self._vocabulary.table
        return table[token] if 0 <= token < len(table) else b""

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool, **options: Any) -> str:
        """Apply the model's chat template; see ``ChatTemplate.render``.

        Raises:
            ChatTemplateError: there is none, or it refused the messages.
        """
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **options)


def _complaint(texts: Sequence[str], error: Exception) -> str:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            return f"the prompt is not valid Unicode ({cause}); replace lone surrogates before passing it"
    return f"the tokenizer failed on the prompt: {error}"
