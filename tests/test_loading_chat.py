"""Chat templates: choice, variables, sandbox, and errors."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from asyncsched.errors import ChatTemplateError
from asyncsched.gpu.loading.chat import ChatTemplate
from asyncsched.gpu.loading.tokenizer_files import folder_tokenizer

USER = {"role": "user", "content": "hi"}


def render(template: str, *messages: dict[str, Any], add_generation_prompt: bool = False, **options: Any) -> str:
    chat = ChatTemplate({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"})
    return chat.render(messages, add_generation_prompt=add_generation_prompt, **options)


def test_messages_variables_and_options() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[bot]{% endif %}{{ style }}"
    )
    assert render(template, USER, USER, style="!") == "<s>[user]hi</s>[user]hi</s>!"
    assert render(template, USER, add_generation_prompt=True) == "<s>[user]hi</s>[bot]"


def test_block_lines_leave_no_blanks() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n", USER) == "hi\n"


def test_absent_tools_and_documents_are_none() -> None:
    template = "{{ tools is none }} {{ documents is none }}"
    assert render(template) == "True True"
    assert render(template, tools=[{}]) == "False True"


def test_json_is_left_readable() -> None:
    assert (
        render("{{ tools | tojson }}", tools=[{"name": "<wetter> für & 'Zürich'"}]) == '[{"name": "<wetter> für & \'Zürich\'"}]'
    )
    assert render("{{ tools | tojson(indent=2) }}", tools=[1]) == "[\n  1\n]"


def test_loop_controls_generation_marks_and_dates() -> None:
    assert (
        render("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", USER, USER)
        == "hi"
    )
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", USER) == "ahib"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert int(render("{{ strftime_now('%Y') }}")) - datetime.now().year in (-1, 0)


def test_a_tool_template_is_used_with_tools() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert chat.render([], add_generation_prompt=False) == "plain"
    assert chat.render([], add_generation_prompt=False, tools=[]) == "plain"
    assert chat.render([], add_generation_prompt=False, tools=[{}]) == "tools"


def test_no_template() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template; pass one prompt string"):
        ChatTemplate({}, {}).render([USER], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "cause", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", jinja2.TemplateError, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", TypeError, "TypeError"),
        ("{{ messages[7].content.x }}", jinja2.UndefinedError, "UndefinedError"),
        ("{% if %}", jinja2.TemplateSyntaxError, "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", jinja2.exceptions.SecurityError, "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", jinja2.exceptions.SecurityError, "SecurityError"),
    ],
)
def test_refusals_carry_their_cause(template: str, cause: type[Exception], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(template, USER)
    assert isinstance(caught.value.__cause__, cause)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    library = Tokenizer(BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def chat_of(folder: Path, **options: Any) -> str:
    tokenizer = folder_tokenizer(folder, {}, {})
    assert tokenizer is not None
    return tokenizer.render_chat([USER], add_generation_prompt=False, **options)


def test_where_a_folder_keeps_its_template(folder: Path) -> None:
    with pytest.raises(ChatTemplateError):
        chat_of(folder)
    settings: dict[str, Any] = {"eos_token": {"content": "</s>"}, "chat_template": "config {{ eos_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat_of(folder) == "config </s>"
    settings["chat_template"] = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat_of(folder) == "one"
    assert chat_of(folder, tools=[{}]) == "two"
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}", encoding="utf-8")
    assert chat_of(folder) == "file </s>"


def test_named_tokens_of_older_folders(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>", "additional_special_tokens": ["x"]}')
    (folder / "chat_template.jinja").write_text("{{ eos_token }}", encoding="utf-8")
    assert chat_of(folder) == "</s>"
