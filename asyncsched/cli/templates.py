"""What ``new-policy`` writes around the policy itself. Templates for ``string.Template``."""

from __future__ import annotations

PYPROJECT = """\
[build-system]
requires = ["setuptools >= 77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
description = "$does"
readme = "README.md"
requires-python = ">=3.11"
${authors}dependencies = ["asyncsched-llm >= $version"]

[project.optional-dependencies]
test = ["pytest >= 8"]

[project.entry-points."asyncsched.policies"]
$name = "$module:$cls"

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
$module = ["py.typed"]

[tool.ruff]
line-length = 100

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

README = """\
# $name

A policy for the LLM inference engine asyncsched. $does

```console
$$ python -m pip install $name
$$ asyncsched policies $name
```

```python
engine = asyncsched.Engine($option="$name")
options = {"name": "$name", $example}
engine = asyncsched.Engine($option=options)
```

The options are the fields of `$module.$cls`; the command above lists them with their defaults.

## Development

```console
$$ python -m pip install -e '.[test]'
$$ python -m pytest
$$ asyncsched simulate TRACE --$flag $name
```

## Licence

Not chosen yet: until then, nobody but the author may use this. To choose one, put its text into
a file `LICENSE`, its SPDX name into `pyproject.toml`, section `[project]`, as `license = "…"`, and
name it here.
"""

GITIGNORE = """\
__pycache__/
*.egg-info/
build/
dist/
.venv/
"""
