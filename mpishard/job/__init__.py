"""Job scripts: what a site needs, what a job asks for, and the script made of both. No MPI, no torch."""

from mpishard.job.render import rendered
from mpishard.job.request import Program, Request
from mpishard.job.site import Site, site_named, site_names

__all__ = ["Program", "Request", "Site", "rendered", "site_named", "site_names"]
