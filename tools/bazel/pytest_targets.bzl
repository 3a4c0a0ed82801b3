"""One target per test file, so that a new file is a target by itself."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_targets(files, deps, data = [], smoke = [], exclusive = []):
    """Declares a py_test for every file, named like it.

    Args:
        files: test files, relative to the package, each ending in `_test.py`.
        deps: what all of them import.
        data: what all of them read.
        smoke: those that `--test_tag_filters=smoke` picks: seconds each, together the whole chain.
        exclusive: those that no other test may run beside.
    """
    for path in smoke + exclusive:
        if path not in files:
            fail("tests/BUILD names {}, which is not there".format(path))
    for path in files:
        tags = ["smoke"] if path in smoke else []
        tags += ["exclusive"] if path in exclusive else []
        py_test(
            name = path[:-len(".py")],
            timeout = "long",
            srcs = [path, "//tools/bazel:pytest_main.py"],
            args = ["{}/{}".format(native.package_name(), path)],
            data = data,
            # Made-up __init__ files would turn folders of tests into packages.
            legacy_create_init = 0,
            main = "//tools/bazel:pytest_main.py",
            tags = tags,
            deps = deps,
        )
