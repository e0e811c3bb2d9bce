"""Times the optimizer steps of a program, which knows nothing of it. Python imports this as it starts, where this
folder is on PYTHONPATH; nothing happens without the variable TIMED_STEPS, a path.

Each process that made steps leaves PATH.PID when it ends, JSON of

    cpu, clock   its own CPU seconds, and the machine's clock, at the end of each step
    children     CPU seconds of the processes that it had waited for by the first
    memory       the most that it has held, KiB
"""

import os
import sys

PATH = os.environ.get("TIMED_STEPS")

if PATH:
    import atexit
    import time

    cpu, clock, noted = [], [], {}

    def note(*_, now=time.monotonic, used=time.process_time):
        cpu.append(used())
        clock.append(now())
        if len(cpu) == 1:
            import resource

            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            noted["children"] = children.ru_utime + children.ru_stime

    def leave():
        if not cpu:
            return
        import json

        # The kernel's own mark of this program: what `wait4` says of a child includes what its parent held.
        with open("/proc/self/status") as status:  # noqa: PTH123
            noted["memory"] = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        with open(f"{PATH}.{os.getpid()}", "w") as file:  # noqa: PTH123
            json.dump(noted | {"cpu": cpu, "clock": clock}, file)

    class Watch:
        """Is asked where each module is, and answers never; SGD's is the sign that torch's optimizers are there."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "torch.optim.sgd":
                sys.meta_path.remove(Watch)
                from torch.optim.optimizer import register_optimizer_step_post_hook

                register_optimizer_step_post_hook(note)

    sys.meta_path.insert(0, Watch)
    atexit.register(leave)
    os.register_at_fork(after_in_child=cpu.clear)  # what a fork has of them are its parent's
