"""What pytest needs to know before it collects the tests: the device, and the sanitizer's runtime."""

import ctypes
import os
import subprocess
import sys


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), help="instead of BOOKENDS_DEVICE (default: cpu)")


def pytest_configure(config):
    if config.option.device:
        os.environ["BOOKENDS_DEVICE"] = config.option.device
    for sanitizer in ("address", "thread"):
        if sanitizer in os.environ.get("SANITIZE", ""):
            load_sanitizer(config, sanitizer)


def load_sanitizer(config, sanitizer):
    """A library built with the address or the thread sanitizer loads only into a process that has its runtime from the
    start: so Python is started anew with it, once. Python itself leaks as it likes, and a race ends it, so that the
    test fails. The programs that the tests start bring their own runtime, and get the environment as it was."""
    library, variable, own = {"address": ("libasan.so", "ASAN_OPTIONS", "detect_leaks=0:"),
                              "thread": ("libtsan.so", "TSAN_OPTIONS", "halt_on_error=1:")}[sanitizer]
    if "BOOKENDS_SANITIZER_OPTIONS" not in os.environ:
        compiler = (os.environ.get("CXX") or "g++").split()
        runtime = subprocess.check_output(compiler + ["-print-file-name=" + library], universal_newlines=True).strip()
        if not os.path.isabs(runtime):
            raise SystemExit("SANITIZE=%s: %s has no %s to load into Python" % (sanitizer, " ".join(compiler), library))
        os.environ["BOOKENDS_SANITIZER_OPTIONS"] = os.environ.get(variable, "")
        os.environ[variable] = own + os.environ.get(variable, "")
        os.environ["LD_PRELOAD"] = runtime
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()
        terminal = os.dup(2)
        os.set_inheritable(terminal, True)
        os.environ["BOOKENDS_SANITIZER_FD"] = str(terminal)
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *config.invocation_params.args])
    if not hasattr(config, "workerinput"):  # past pytest, which would take the report down with it
        report_to = ctypes.c_void_p(int(os.environ["BOOKENDS_SANITIZER_FD"]))
        ctypes.CDLL(None).__sanitizer_set_report_fd(report_to)
    starts_workers = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    if not starts_workers:  # the workers must inherit it; the programs must not
        os.environ.pop("LD_PRELOAD", None)
        os.environ[variable] = os.environ["BOOKENDS_SANITIZER_OPTIONS"]
