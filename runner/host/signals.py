"""Signals that end a run: within its calls, between them, and in a forked child."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..failures import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED, print_line

# A second signal so soon after the first is the same request: `timeout` signals a process and its group; systemd and
# Slurm signal all processes of a job, and a supervisor then passes its own on.
SAME_REQUEST_SECONDS = 1.0
_ANSWER_SECONDS = 0.5  # after a signal; a run that has ended by then has no need of it
_ACTION_BYTES = 512  # size of a `struct sigaction`, or more
# Exit codes after the run was saved. SIGUSR1 is what Slurm's users have sent some time before SIGTERM.
EXIT_CODES = {
    "SIGHUP": EXIT_HUNG_UP,
    "SIGINT": EXIT_INTERRUPTED,
    "SIGTERM": EXIT_TERMINATED,
    "SIGUSR1": EXIT_TERMINATED,
}
_EXIT_CODES = {signal.Signals[name]: code for name, code in EXIT_CODES.items()}


class SecondSignal:
    """Tells a second signal, which ends at once, from the first, and from what is the same request as the first."""

    def __init__(self):
        self._first: float | None = None

    def __call__(self, number: int) -> bool:
        """Notes a signal, and returns whether it is a second one. SIGUSR1 never is, nor is the first after it."""
        if number == signal.SIGUSR1:
            return False
        self._first = self._first or time.monotonic()
        return time.monotonic() - self._first > SAME_REQUEST_SECONDS


def has_usual_effect(number: int) -> bool:
    """Returns whether a signal has no handler; C's count, such as that of `faulthandler.register`."""
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    ctypes.CDLL(None).sigaction(number, None, action)
    return not any(action.raw[: ctypes.sizeof(ctypes.c_void_p)])


def end_pid_1() -> None:
    """Makes SIGTERM end this process with 143 if it is pid 1, as in a container, for which the kernel ignores it.

    Until a run, or the program, has a handler of its own. A thread does it: Python runs no handler while TensorFlow
    compiles.
    """
    if os.getpid() != 1 or not has_usual_effect(signal.SIGTERM):
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    handlers = Handlers([signal.SIGTERM], lambda *_: None)

    def end() -> None:
        while signal.SIGTERM not in os.read(reading, 4096) or signal.getsignal(signal.SIGTERM) != handlers._handle:
            pass
        os._exit(EXIT_TERMINATED)

    _thread.start_new_thread(end, ())  # not one of `threading`'s: the program has started none, and may be forked
    handlers.install(writing)


@contextlib.contextmanager
def keeping_sigterm():
    """Keeps this process's handler of SIGTERM, which TensorFlow replaces by its own as it joins a cluster.

    TensorFlow's only takes a note, and no run reads it. Within, the signal waits, in this thread and in those that it
    starts.
    """
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    # The C library's, since Python sets handlers in the main thread alone.
    exchange = ctypes.CDLL(None).sigaction
    exchange(signal.SIGTERM, None, action)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        exchange(signal.SIGTERM, action, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Handlers:
    """Handlers of signals, in this process alone: a forked child has the previous ones.

    SIGHUP stays ignored where it is (nohup), and a program keeps its own handler of SIGUSR1. A thread that is not the
    main one gets no signals: there nothing is done.
    """

    def __init__(self, numbers: Iterable[signal.Signals], act: Callable[[int, Any], None]):
        self._numbers, self._act = [*numbers], act
        self._process: int | None = None  # id of the process in which they are installed
        self._before: dict[int, Any] = {}
        self._wakeup, self._wakeup_before = -1, -1

    def install(self, wakeup: int = -1) -> None:
        """Sets the handlers, and the file that Python writes signals' numbers to, if any."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._process, self._wakeup = os.getpid(), wakeup
        if wakeup >= 0:
            self._wakeup_before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in self._numbers:
            before = signal.getsignal(number)
            is_ours = isinstance(getattr(before, "__self__", None), Handlers)
            if number == signal.SIGUSR1:
                stays = not is_ours and not has_usual_effect(number)
            else:
                stays = number == signal.SIGHUP and before == signal.SIG_IGN
            if not stays:
                self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL

    def handles(self, number: int) -> bool:
        return number in self._before

    def remove(self) -> None:
        """Restores the previous handlers, unless they were replaced since."""
        self._process = None
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def _restore(self) -> None:
        # A descriptor that other code has set since stays.
        if self._wakeup >= 0 and (now := signal.set_wakeup_fd(self._wakeup_before)) != self._wakeup:
            signal.set_wakeup_fd(now)
        self._wakeup = -1
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    def _handle(self, number: int, frame: Any) -> None:
        if self._process == os.getpid():
            self._act(number, frame)
        else:  # removed in another thread, or while later ones stood before it
            signal.signal(number, self._before[number])
            signal.raise_signal(number)

    @staticmethod
    def before_fork() -> None:
        """Lets signals wait: Python would lose those that a child gets before its handlers are restored."""
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _EXIT_CODES)

    @staticmethod
    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)

    @staticmethod
    def leave_to_child() -> None:
        """Restores, in a forked child, the handlers set before any of this class."""
        for number in _EXIT_CODES:
            while isinstance(handlers := getattr(signal.getsignal(number), "__self__", None), Handlers):
                handlers._restore()
        Handlers.after_fork()


_forking = threading.local()  # the signals that a thread that forks has blocked
os.register_at_fork(
    before=Handlers.before_fork, after_in_parent=Handlers.after_fork, after_in_child=Handlers.leave_to_child
)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt on Ctrl-C, also where an extension module has turned that into another error."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    handlers = Handlers([signal.SIGINT], interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or another's
        handlers.install()
    try:
        yield
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        handlers.remove()


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Lets Ctrl-C end the process at once, for a body that holds Python's lock: no handler would run within.

    A program's own handler stays, and so does a Ctrl-C that is ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    is_usual = before is signal.default_int_handler or isinstance(getattr(before, "__self__", None), Handlers)
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Signals:
    """SIGTERM, SIGUSR1, Ctrl-C and SIGHUP: the first makes the run save and end, a second one ends the process at once.

    Prints that if it takes more than a moment. `SecondSignal` tells what is a second one.

    Installed after the strategy is made, since some of TensorFlow's replace earlier handlers.

    Args:
      request: called with the signal's name; must only take a note.
      ends_process: whether a second one ends the process; else a second Ctrl-C is a KeyboardInterrupt.
      is_reused: whether this context is entered many times, until `close`: its thread then stays between.
      meanwhile: called in a thread if the run does not end within a moment, since it is busy; returns a line to print.
      saves: whether the run has a folder, where it is saved.
    """

    def __init__(
        self,
        request,
        ends_process: bool = True,
        is_reused: bool = False,
        meanwhile: Callable[[], str | None] = lambda: None,
        saves: bool = True,
    ):
        self._request = request
        self._meanwhile, self._saves = meanwhile, saves
        self._ends_process = ends_process
        self._is_reused = is_reused
        self._requested = False
        self._answering: threading.Thread | None = None
        # Writing end of the pipe that Python writes signals' numbers to. A forked child has it too, but gets its
        # signals once `Handlers` has restored its own.
        self._wakeup, self._process = -1, -1
        self._handlers = Handlers(_EXIT_CODES, self._handle)

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(RuntimeError):  # no thread begins while the interpreter ends
                if self._answering is None:
                    reading, self._wakeup = os.pipe()
                    os.set_blocking(self._wakeup, False)
                    arguments = reading, self._handlers, self._ends_process, self._meanwhile, self._saves
                    answering = threading.Thread(target=_answer, args=arguments, name="signals", daemon=True)
                    answering.start()
                    self._answering, self._process = answering, os.getpid()
            self._handlers.install(self._wakeup if self._answering else -1)
        return self

    def __exit__(self, *_) -> None:
        self._handlers.remove()
        if self._requested or not self._is_reused:
            self.close()
        self._requested = False

    def close(self) -> None:
        """Ends the thread that answers signals; entering the context again starts another."""
        if self._answering is None:
            return
        if self._process == os.getpid():  # a forked child has no such thread, and would end its parent's
            os.write(self._wakeup, b"\0")
            self._answering.join()
        os.close(self._wakeup)
        self._answering, self._wakeup = None, -1

    def _handle(self, number: int, frame: Any) -> None:
        if not self._requested:
            self._requested = True
            self._request(signal.Signals(number).name)
        elif not self._ends_process and number == signal.SIGINT:
            signal.default_int_handler(number, frame)


class Standby:
    """SIGTERM, SIGUSR1 and SIGHUP between the calls of a run that its program holds. Entered while the run is open.

    One that arrives within a call is answered at its end, which comes soon: see `Strategy.evaluate`.

    Args:
      end: a method, called with the signal's name: ends the run, and then raises the signal again.

    Attributes:
      name: name of the signal that waits for the end of a call; None without one.
    """

    def __init__(self, end: Callable[[str], None]):
        self._end = weakref.WeakMethod(end)  # a run that nobody holds any more is not kept by its handlers
        self._handlers = Handlers([number for number in _EXIT_CODES if number != signal.SIGINT], self._handle)
        self._calls: list[int] = []  # a thread's id for each of its calls; a list is changed by one at a time
        self.name: str | None = None

    def __enter__(self) -> Standby:
        self._handlers.install()
        return self

    def __exit__(self, *_) -> None:
        self._handlers.remove()

    @property
    def is_within_call(self) -> bool:
        return bool(self._calls)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Makes a signal within the body wait for its end, where it may be one of several calls within each other."""
        self._calls.append(threading.get_ident())
        try:
            yield
        finally:
            self._calls.remove(threading.get_ident())
            self._answer()

    def note(self, name: str | None) -> None:
        """Notes a signal to handle at the end of the call."""
        self.name = self.name or name

    def _handle(self, number: int, frame: Any) -> None:
        self.note(signal.Signals(number).name)
        self._answer()

    def _answer(self) -> None:
        name, end = self.name, self._end()
        if name and not self._calls:
            self.name = None
            if end is not None:
                end(name)
            else:
                self._handlers.remove()
                signal.raise_signal(signal.Signals[name])


def _answer(
    reading: int, handlers: Handlers, ends_process: bool, meanwhile: Callable[[], str | None], saves: bool
) -> None:
    """Prints the consequence of a signal that has had no effect for half a second. Runs in a thread.

    Python runs a handler between its own instructions only: not within a compiled call, nor while one is compiled,
    which may take minutes. At once it only writes the signal's number to the pipe.

    Args:
      reading: reading end of the pipe; closed at the end.
      handlers: the run's; the pipe also gets the numbers of the program's.
      ends_process, meanwhile, saves: see `Signals`.
    """

    def save() -> None:
        if line := meanwhile():
            print_line(line)

    saving: threading.Thread | None = None
    first, name, is_answered, is_second = None, "", False, SecondSignal()
    while True:
        waits = None if first is None or is_answered else max(0.0, first + _ANSWER_SECONDS - time.monotonic())
        if not select.select([reading], [], [], waits)[0]:
            is_answered = True
            saved = ", saved in its run_dir," if saves else ""
            after = "one after the next" if name == "SIGUSR1" else "a second signal"
            second = f"; {after} ends the process at once" if ends_process else ""
            print_line(f"{name}: the run ends{saved} once the call, compilation or callback is done{second}")
            # In another thread: a second signal ends the process meanwhile.
            saving = threading.Thread(target=save, name="saving")
            saving.start()
            continue
        numbers = os.read(reading, 4096)
        if 0 in numbers:
            break
        for number in map(signal.Signals, filter(handlers.handles, numbers)):
            if first is None:
                first, name = time.monotonic(), number.name
            if is_second(number) and ends_process:
                if os.isatty(1):
                    os.write(1, b"\x1b[?25h")  # shows the cursor again, which a progress bar hides
                os._exit(_EXIT_CODES[number])
    if saving is not None:
        saving.join()
    os.close(reading)
