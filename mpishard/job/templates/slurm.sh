{% import "parts.sh" as parts %}
#!/usr/bin/env bash
# {{ made_by }}
#
# {{ job.ranks }} rank{{ 's' if job.ranks > 1 }}; {{ job.site.title }}. Submit it with sbatch from the folder that the command starts in.
#SBATCH --job-name={{ job.job_name | directive }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node={{ job.ranks_on_node }}
#SBATCH --cpus-per-task={{ job.cpus }}
{% if job.gpus %}
#SBATCH --gpus-per-node={{ job.gpus }}
{% endif %}
#SBATCH --time={{ job.time }}
{% if job.account %}
#SBATCH --account={{ job.account | directive }}
{% endif %}
{% if partition %}
#SBATCH --partition={{ partition | directive }}
{% endif %}
{% for line in fact("directives", []) %}
#SBATCH {{ line }}
{% endfor %}
{% if job.array %}
#SBATCH --array={{ job.array }}
{% endif %}
#SBATCH --output=slurm-{{ "%A_%a" if job.array else "%j" }}.out
{% if job.saves %}
# {{ job.notice | capitalize }} before the time is over, and where the site preempts jobs with a grace time, this script is told.
#SBATCH --signal=B:USR1@{{ job.notice_s }}
{% endif %}
{% if job.requeues %}
#SBATCH --requeue
#SBATCH --open-mode=append
{% else %}
#SBATCH --no-requeue
{% endif %}
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
{% if job.requeues %}

# Slurm counts the restarts, also those after a node's failure.
restarts=${SLURM_RESTART_COUNT:-0} most={{ job.requeues }}
if [ "$restarts" -gt "$most" ]; then
    echo "started again $restarts times, and the cap is $most (--max-requeues): no more" >&2
    exit 1
fi
{% endif %}

{{ parts.environment(job, env, modules, variables) -}}
# srun does not inherit --cpus-per-task from the job
export SRUN_CPUS_PER_TASK={{ job.cpus }}
{{ parts.checkpoints(job, "SLURM_ARRAY_TASK_ID") }}
{% if job.gpus %}
# Every rank sees every GPU of its node, and takes the one of its place on the node: ranks that see only their own
# GPU cannot copy from each other's directly.
{% endif %}
{% if job.multi_prog %}
# One command a program, and the ranks of each: the environment takes any word, srun's file does not.
{% for program in programs %}
export MPISHARD_PROGRAM_{{ loop.index0 }}={{ ("exec " ~ (program.command | joined)) | quoted }}
{% endfor %}
programs=$(mktemp)
trap 'rm -f "$programs"' EXIT
cat >"$programs" <<'END'
{% for ranks in numbers %}
{{ ranks }} bash -c 'eval "$MPISHARD_PROGRAM_{{ loop.index0 }}"'
{% endfor %}
END
{% set command = '--multi-prog "$programs"' %}
{% else %}
{% set command = (programs[0].command | joined) ~ ' "$@"' %}
{% endif %}
srun {{ options | joined }} \
    {{ command }}{{ " &" if job.saves }}
{% if job.saves %}
{{ parts.told_to_stop() -}}
{% if job.requeues %}
{{ parts.cap() -}}
elif [ "$code" -eq 75 ]; then
{% if job.array %}
    # this task alone: one task has the number of the whole array, too
    job=${SLURM_ARRAY_JOB_ID:?}_${SLURM_ARRAY_TASK_ID:?}
{% else %}
    job=${SLURM_JOB_ID:?}
{% endif %}
    case $(scontrol --oneliner show job "$job" || true) in
    *" JobState=COMPLETING Reason=TimeLimit "*) ;;
    *" JobState=COMPLETING "* | *" JobState=CANCELLED "*)
        # a program saves when its user cancels it, too; and of what Slurm queues again itself nothing is to be done
        echo "cancelled, or queued again by Slurm: not queued again here" >&2
        exit "$code"
        ;;
    esac
    # goes back to the queue under its number, and ends this script
    scontrol requeue "$job"
    wait
fi
{% endif %}
exit "$code"
{% endif %}
