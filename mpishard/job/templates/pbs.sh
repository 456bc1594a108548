{% import "parts.sh" as parts %}
#!/usr/bin/env bash
# {{ made_by }}
#
# {{ job.ranks }} rank{{ 's' if job.ranks > 1 }}; {{ job.site.title }}. Submit it with qsub from the folder that the command starts in.
#PBS -N {{ job.job_name }}
{% if fact("launcher") == "pals" %}
#PBS -l select={{ job.nodes }}{{ ":" ~ fact("select") if fact("select") }}
{% else %}
#PBS -l select={{ job.nodes }}:ncpus={{ job.ranks_on_node * job.cpus }}:mpiprocs={{ job.ranks_on_node }}{{ ":ngpus=" ~ job.gpus if job.gpus }}
{% endif %}
#PBS -l walltime={{ "%02d:%02d:%02d" % (job.time_s // 3600, job.time_s // 60 % 60, job.time_s % 60) }}
{% if job.account %}
#PBS -A {{ job.account }}
{% endif %}
{% if partition %}
#PBS -q {{ partition }}
{% endif %}
{% for line in fact("directives", []) %}
#PBS {{ line }}
{% endfor %}
{% if job.array %}
#PBS -J {{ job.array }}
{% endif %}
#PBS -j oe
{% if not job.array %}
#PBS -r n
{% endif %}
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"

{% if job.array %}
# a job that goes on alone has the index of the one that stopped
export PBS_ARRAY_INDEX=${PBS_ARRAY_INDEX:-${MPISHARD_ARRAY_INDEX:-0}}
{% endif %}
{{ parts.environment(job, env, modules, variables) -}}
{{ parts.checkpoints(job, "PBS_ARRAY_INDEX") }}
{% if job.gpus %}
# Every rank sees every GPU of its node, and takes the one of its place on the node: ranks that see only their own
# GPU cannot copy from each other's directly.
{% endif %}
{% if job.saves %}
# PBS gives no warning: {{ job.notice }} before the time is over, the launcher gets a USR1 and hands it on to every rank.
# The ranks agree after which step they save, and end with code 75.
code=0
timeout --foreground --preserve-status --signal=USR1 {{ job.time_s - job.notice_s }} \
    mpiexec {{ (options | joined) ~ " " if options }}\
{% else %}
mpiexec {{ (options | joined) ~ " " if options }}\
{% endif %}
{% for program in programs %}
    {{ ": " if loop.index0 }}-n {{ program.ranks }} {{ program.command | joined }}{{ " \\" if not loop.last }}{{ " || code=$?" if loop.last and job.saves }}
{% endfor %}
{% if job.requeues %}
{{ parts.too_early() -}}
restarts=${MPISHARD_RESTARTS:-0} most={{ job.requeues }}
{{ parts.cap() -}}
elif [ "$code" -eq 75 ]; then
    # a job of its own, with the directives above{{ " but for the array's: this one alone goes on" if job.array }}
{% if job.array %}
    sed '/^#PBS -J /d' "$0" |
        qsub -v "MPISHARD_RESTARTS=$((restarts + 1)),MPISHARD_ARRAY_INDEX=$PBS_ARRAY_INDEX" ||
        echo "not queued again: submit this script by hand, and it goes on" >&2
{% else %}
    qsub -v "MPISHARD_RESTARTS=$((restarts + 1))" "$0" ||
        echo "not queued again: submit this script by hand, and it goes on" >&2
{% endif %}
fi
{% endif %}
{% if job.saves %}
exit "$code"
{% endif %}
