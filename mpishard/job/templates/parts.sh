{# What the scripts of all schedulers have in common. #}
{% macro environment(job, env, modules, variables) %}
{% if modules %}
module load {{ modules | joined }}
{% endif %}
{% if env %}
environment={{ env | quoted }}
if [ -d "$environment" ]; then environment=$environment/bin/activate; fi
# such scripts use variables that are not set
set +u
# shellcheck source=/dev/null
source -- "$environment"
set -u
{% endif %}
# what arrays free stays the process's: the kernel would clear each page that is used again
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"
{% for name, value in variables.items() %}
export {{ name }}={{ value | quoted }}
{% endfor %}
export OMP_NUM_THREADS={{ job.cpus }}
{% endmacro %}

{% macro checkpoints(job, index) %}
{% if job.checkpoints %}
# where the program saves when it is told to stop, and goes on from
export MPISHARD_CHECKPOINTS={{ job.checkpoints | quoted }}{% if job.array %}/"${{ '{' }}{{ index }}:-0}"{% endif +%}
{% endif %}
{% endmacro %}

{# After the launcher was started in the background, so that this script hears signals and hands them on. #}
{% macro told_to_stop() %}
launcher=$!

# The launcher hands a USR1 on to every rank; the ranks agree after which step they save, and end with code 75.
told=0
trap 'told=1; kill -USR1 "$launcher" 2>/dev/null || true' USR1 TERM
while :; do
    told=0 code=0
    wait "$launcher" || code=$?
    # a signal ends the wait, not the launcher
    if [ "$told" -eq 0 ]; then break; fi
done
{{ too_early() -}}
{% endmacro %}

{% macro too_early() %}
# 138: USR1 ended the program, which was still starting and did not notice signals yet; it can start again
if [ "$code" -eq 138 ] && [ "$SECONDS" -lt 300 ]; then code=75; fi
{% endmacro %}

{% macro cap() %}
if [ "$code" -eq 75 ] && [ "$restarts" -ge "$most" ]; then
    echo "started again $restarts times, and the cap is $most (--max-requeues): no more" >&2
{% endmacro %}
