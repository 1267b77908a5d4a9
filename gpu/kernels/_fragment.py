"""How a part of a kernel is compiled: down to LLVM's intermediate code, and no further.

By itself numba optimises every compiled function and makes machine code of it, and does both again
for each function it is linked into. But of a kernel only the entry point is ever run, with all its
parts inside: most of what is done to a part alone is thrown away. What is kept are the passes over
single functions, without which loops over slices no longer become vector code once all is in one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

codegen: Any = import_module("numba.core.codegen")
compiler: Any = import_module("numba.core.compiler")


class Fragment(codegen.JITCodeLibrary):  # type: ignore[misc]  # numba is Any
    """A part's library: linked into the libraries of entry points, which optimise the whole at once."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        # Unlike its base it is not handed to the execution engine, which would make machine code of it.
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """0: there is no code to run."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Fragment:
        """Where numba registers a function's environment (its constants that are Python objects)."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Nowhere: parts have no such constants, and there is no code that could look for them."""


class PartCompiler(compiler.CompilerBase):  # type: ignore[misc]  # numba is Any
    """Numba's usual passes, ending in a :class:`Fragment`."""

    def define_pipelines(self) -> list[Any]:
        """The passes, see numba's "Customizing the compiler"."""
        state = self.state
        state.library = Fragment(state.targetctx.codegen(), state.func_id.func_qualname)
        return [compiler.DefaultPassBuilder.define_nopython_pipeline(state)]

    def compile_extra(self, function: Any) -> Any:
        """Compile, and keep of the result what callers need: the rest would stay in memory for good."""
        result = super().compile_extra(function)
        result.fndesc.typemap = result.fndesc.calltypes = None
        return result._replace(type_annotation=None)
