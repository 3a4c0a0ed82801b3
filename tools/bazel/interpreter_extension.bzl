"""The same repository for MODULE.bazel, apart because Bazel 4 knows no `module_extension`."""

load("//tools/bazel:interpreter.bzl", "venv_interpreter")

def _interpreter_impl(_ctx):
    venv_interpreter(name = "venv_interpreter")

interpreter = module_extension(implementation = _interpreter_impl)
