"""The project's own `.venv` as Bazel's Python, with every package in it."""

_BUILD = """\
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
    visibility = ["//visibility:public"],
)
"""

def _venv_interpreter_impl(ctx):
    named = ctx.os.environ.get("LINGVO_GPIPE_PYTHON")
    root = ctx.path(Label("//:WORKSPACE")).dirname

    # Not resolved: the link leads to a Python that knows nothing of the environment.
    python = ctx.path(named) if named else root.get_child(".venv").get_child("bin").get_child("python3")
    if not python.exists:
        fail("there is no {}: run `make setup`, or set LINGVO_GPIPE_PYTHON".format(python))
    ctx.file("BUILD", _BUILD.format(python = python))

venv_interpreter = repository_rule(
    implementation = _venv_interpreter_impl,
    doc = "A Python toolchain of `.venv`, or of the interpreter that $LINGVO_GPIPE_PYTHON names.",
    environ = ["LINGVO_GPIPE_PYTHON"],
    local = True,
)
