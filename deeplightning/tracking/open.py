"""Which tracker a store gets: its database is written directly where that is safe, else through MLflow's client."""

from deeplightning.tracking import sqlite
from deeplightning.tracking.store import Store, is_local
from deeplightning.tracking.tracker import Tracker


def open_tracker(store: Store, run_id: str | None = None, experiment: str | None = None) -> Tracker:
    """The tracker of a store, which is made if it is not there.

    Args:
        run_id: the run that is meant, if it is there already.
        experiment: the experiment that is meant otherwise. Where its files are not on this machine, MLflow has to
            bring them there.

    Raises:
        SetupError: the store cannot be made or used.
    """
    if store.database is not None:
        found = sqlite.open_directly(store)
        if found is not None:
            run = found.run(run_id) if run_id is not None else None
            location = run.artifact_uri if run else found.location_of(experiment) if experiment else None
            if location is None or is_local(location):
                return found
            found.close()
    from deeplightning.tracking.client import Client

    return Client(store)
