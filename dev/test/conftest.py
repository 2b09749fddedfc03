"""What pytest needs to know before it collects the tests: the device, and the address sanitizer's runtime."""

import ctypes
import os
import subprocess
import sys


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), help="instead of BOOKENDS_DEVICE (default: cpu)")


def pytest_configure(config):
    if config.option.device:
        os.environ["BOOKENDS_DEVICE"] = config.option.device
    if "address" in os.environ.get("SANITIZE", ""):
        load_address_sanitizer(config)


def load_address_sanitizer(config):
    """A library built with the address sanitizer loads only into a process that has its runtime from the start: so
    Python is started anew with it, once. Python itself leaks as it likes. The programs that the tests start bring
    their own runtime, and get the environment as it was."""
    if "BOOKENDS_ASAN_OPTIONS" not in os.environ:
        compiler = (os.environ.get("CXX") or "g++").split()
        runtime = subprocess.check_output(compiler + ["-print-file-name=libasan.so"], universal_newlines=True).strip()
        if not os.path.isabs(runtime):
            raise SystemExit("SANITIZE=address: %s has no libasan.so to load into Python" % " ".join(compiler))
        os.environ["BOOKENDS_ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "")
        os.environ["ASAN_OPTIONS"] = "detect_leaks=0:" + os.environ.get("ASAN_OPTIONS", "")
        os.environ["LD_PRELOAD"] = runtime
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()
        terminal = os.dup(2)
        os.set_inheritable(terminal, True)
        os.environ["BOOKENDS_ASAN_FD"] = str(terminal)
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *config.invocation_params.args])
    if not hasattr(config, "workerinput"):  # past pytest, which would take the report down with it
        ctypes.CDLL(None).__sanitizer_set_report_fd(ctypes.c_void_p(int(os.environ["BOOKENDS_ASAN_FD"])))
    starts_workers = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    if not starts_workers:  # the workers must inherit it; the programs must not
        os.environ.pop("LD_PRELOAD", None)
        os.environ["ASAN_OPTIONS"] = os.environ["BOOKENDS_ASAN_OPTIONS"]
