"""Ctrl-C that every rank catches, inside one call on one of them and before it on the other: they do not go on."""

from __future__ import annotations

import pytest

BODY = """
import threading
from mpishard.comm import guard

mesh = ms.init_mesh((-1,))
sharded = (ms.Shard(0),)
xs = [ms.distribute_tensor(torch.arange(12.0).view(6, 2) + 100 * i, mesh, sharded) for i in range(6)]
calls = {
    "sum": lambda x: x.sum().item(),
    "gather": lambda x: x.full_tensor(),
    "redistribute": lambda x: x.redistribute((ms.Shard(1),)).to_local(),
    "halos": lambda x: ms.halo_exchange(x, {0: (1, 1)}),
}
call = calls[os.environ["CALL"]]
call(xs[0])
world.Barrier()
try:
    if rank == 0:
        def interrupt():
            while not guard._live:  # it waits for the other rank
                time.sleep(0.001)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            note("INTERRUPTED")
        threading.Thread(target=interrupt, daemon=True).start()
        call(xs[1])
    else:
        while "INTERRUPTED" not in open(os.environ["NOTES"]).read():
            time.sleep(0.001)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    note("CAUGHT")
for x in xs[2:]:
    call(x)
note("WENT ON")
"""


@pytest.mark.parametrize("call", ["sum", "gather", "redistribute", "halos"])
def test_caught_on_all_ranks_in_different_calls(job, call):
    """Each later call took what another rank had sent for the one before: wrong numbers, and no error."""
    outcome = job(2, BODY, CALL=call)
    outcome.failed_with("mesh used after a call on it was interrupted", "KeyboardInterrupt inside")
    assert len(outcome.noted("CAUGHT")) == 2
    assert not outcome.noted("WENT")
