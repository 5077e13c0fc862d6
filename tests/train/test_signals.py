"""The first signal is remembered, the second ends the process as usual."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from longstrand.train.signals import Stopped, StopRequests


def _send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_a_step_is_remembered_and_said(number, code, capfd):
    before = signal.getsignal(number)
    with StopRequests() as stop:
        assert stop.number is None
        _send(number)
        assert stop.number == number
        assert signal.getsignal(number) == before
    assert "finishing this step, then saving" in capfd.readouterr().err
    assert Stopped(number, "x").exit_code == code


def test_where_nothing_would_be_lost_it_leaves_at_once():
    refused = pytest.raises(Stopped, match=r"stopped by SIGTERM: nothing yet")
    with refused, StopRequests() as stop, stop.leaving_at_once("nothing yet"):
        _send(signal.SIGTERM)
        pytest.fail("went on")


def test_a_signal_from_before_is_met_where_leaving_is_allowed():
    with StopRequests() as stop:
        _send(signal.SIGINT)
        with pytest.raises(Stopped, match="stopped by SIGINT: later"), stop.leaving_at_once("later"):
            pytest.fail("went on")


def test_the_second_signal_ends_the_process():
    code = (
        "import os, signal\n"
        "from longstrand.train.signals import StopRequests\n"
        "with StopRequests() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('remembered', stop.number, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == f"remembered {int(signal.SIGTERM)}\n"


def test_a_run_in_another_thread_leaves_the_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def use():
        with StopRequests():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [before]
