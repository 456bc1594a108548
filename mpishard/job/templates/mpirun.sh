{% import "parts.sh" as parts %}
#!/usr/bin/env bash
# {{ made_by }}
#
# {{ job.ranks }} rank{{ 's' if job.ranks > 1 }} on this machine, by the mpiexec of the MPI library that mpi4py uses.
set -euo pipefail

{{ parts.environment(job, env, modules, variables) -}}
{{ parts.checkpoints(job, "") }}
exec mpiexec \
{% for program in programs %}
    {{ ": " if loop.index0 }}-n {{ program.ranks }} {{ program.command | joined }}{{ " \\" if not loop.last else ' "$@"' }}
{% endfor %}
