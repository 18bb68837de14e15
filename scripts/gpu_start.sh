#!/usr/bin/env bash
# Measure on a GPU machine, after `GPU_SITE=/tmp/site scripts/gpu.sh true`, which installs the wheels; $OUT gets what is printed.
#   scripts/gpu_start.sh starts     first and second start of 0.6B and 14B with empty caches, by phase, and --compile-only (180 s)
#   scripts/gpu_start.sh load       14B under load: $VERSIONS (new: this checkout, base: the installed wheels) at $RATES requests/s
set -uo pipefail
cd "$(dirname "$0")/.."
mode=${1:-starts} root=$PWD work=${WORK:-/tmp/gpu_start} port=8011; out=$work/out; mkdir -p "$work/hook" "$out" "${OUT:-$out}"
exec > >(tee "${OUT:-$out}/gpu_start_$mode.txt") 2>&1
site=/tmp/site
sources=; for src in packages/*/src; do sources+=$root/$src:; done
new=$work/hook:$sources$site base=$work/hook:$site
export PATH=$site/bin:$PATH HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
for m in qwen3-0.6b qwen3-14b; do [ -d "$work/$m" ] || PYTHONPATH=$new python3 scripts/make_model.py $m "$work/$m"; done

cat > "$work/hook/sitecustomize.py" <<'P'
import atexit, collections, json, os, sys, threading, time
def sample(out):
    main, counts, stacks, t0 = threading.main_thread().ident, collections.Counter(), collections.Counter(), time.time()
    name = "?"
    def dump():
        with open(f"{out}.{os.getpid()}", "w") as f:
            f.write(f"{sum(counts.values())} samples of 20 ms, {name}\n")
            for key, n in counts.most_common(28): f.write(f"{n*.02:6.2f} s {key}\n")
            f.write("-- by our frames\n")
            for key, n in stacks.most_common(22): f.write(f"{n*.02:6.2f} s {key}\n")
    while time.time() - t0 < 60:
        time.sleep(0.02)
        frame = sys._current_frames().get(main)
        if frame is None: continue
        f, inner, ours = frame, None, []
        while f is not None:
            c = f.f_code; where = f"{'/'.join(c.co_filename.split('/')[-2:])}:{c.co_name}"
            if "importlib" not in c.co_filename: inner = inner or f"{where}:{f.f_lineno}"
            if "minisgl" in c.co_filename: ours.append(f"{where}:{f.f_lineno}")
            f = f.f_back
        counts[f"{ours[0] if ours else '-'} <- {inner}"] += 1
        for each in set(o for o in ours): stacks[each] += 1
        if "minisgl_core.engine.build" in sys.modules and int((time.time()-t0)*10) % 10 == 0:
            name = "engine"; dump()
def trace(out):
    while "minisgl_core.runtime.worker" not in sys.modules or not hasattr(sys.modules["minisgl_core.runtime.worker"], "run_worker"): time.sleep(0.05)
    from minisgl_core.scheduler.scheduler import Scheduler
    f, now = open(f"{out}.{os.getpid()}", "w", buffering=1), time.monotonic
    submit, schedule, process = Scheduler.submit, Scheduler.schedule, Scheduler.process
    def submit_(self, s):
        submit(self, s); f.write(json.dumps(["submit", now(), s.request_id, len(s.token_ids)]) + "\n")
    def schedule_(self):
        t = now(); plan = schedule(self)
        if plan is not None:
            n, sampled = plan.num_decodes, set(plan.sample.index.tolist())
            chunks = [[self.at_row(int(plan.rows[i])).request_id, int(plan.num_new[i]), i in sampled] for i in range(n, plan.num_requests)]
            f.write(json.dumps(["schedule", t, n, plan.num_tokens - n, chunks, self.num_waiting, now() - t]) + "\n")
        return plan
    def process_(self, plan, result):
        t = now(); outs = process(self, plan, result); f.write(json.dumps(["process", t, now() - t]) + "\n"); return outs
    Scheduler.submit, Scheduler.schedule, Scheduler.process = submit_, schedule_, process_
    from minisgl_core.runtime.engine_loop import EngineLoop
    execute_model = EngineLoop._execute_model
    def execute_model_(self, plan):
        t = now(); output = execute_model(self, plan); f.write(json.dumps(["launch", t, now() - t]) + "\n"); return output
    EngineLoop._execute_model = execute_model_
if os.environ.get("START_SAMPLE"): threading.Thread(target=sample, args=(os.environ["START_SAMPLE"],), daemon=True).start()
if os.environ.get("STEP_TRACE") and "spawn_main" in " ".join(sys.orig_argv): threading.Thread(target=trace, args=(os.environ["STEP_TRACE"],), daemon=True).start()
P

cat > "$work/report.py" <<'P'
import glob, json, statistics as st, sys
paths = [p for p in glob.glob(sys.argv[1] + ".*") if '"submit"' in open(p).read()]
rows = [row for row in map(json.loads, open(paths[0])) if row[1] >= float(sys.argv[2])]
sub = {r[2]: (r[1], r[3]) for r in rows if r[0] == "submit"}
sched, steps = [r for r in rows if r[0] == "schedule"], []
procs = [r for r in rows if r[0] == "process"]
launches = [r[2] for r in rows if r[0] == "launch"]
prev = 0
for s, p, launch in zip(sched, procs, launches):
    start = max(prev, s[1]); steps.append(dict(at=s[1], start=start, end=p[1], d=s[2], p=s[3], chunks=s[4], waiting=s[5], launch=launch)); prev = p[1]
q = lambda xs, f: sorted(xs)[min(len(xs) - 1, int(f * len(xs)))] * 1e3 if xs else 0
first = {}
for i, s in enumerate(steps):
    for rid, n, samples in s["chunks"]:
        if samples and rid in sub: first[rid] = i
ttft = {rid: steps[i]["end"] - sub[rid][0] for rid, i in first.items()}
xs = list(ttft.values())
print("server side, submit to first token: n %d p50 %.1f p90 %.1f p99 %.1f ms" % (len(xs), q(xs, .5), q(xs, .9), q(xs, .99)))
lag = [steps[i]["at"] - sub[r][0] for r, i in first.items()]
print("  submit to schedule of the last chunk: p50 %.1f p99 %.1f ms" % (q(lag, .5), q(lag, .99)))
dec = [s["end"] - s["start"] for s in steps if not s["p"]]
print("  decode steps: n %d p50 %.2f p99 %.2f ms; scheduling p50 %.2f, process p50 %.2f p99 %.2f ms" % (len(dec), q(dec, .5), q(dec, .99), q([s[6] for s in sched], .5), q([p[2] for p in procs], .5), q([p[2] for p in procs], .99)))
for lo, hi in ((1, 128), (128, 256), (256, 384), (384, 512), (512, 640), (640, 768), (768, 1024), (1024, 1536), (1536, 3000)):
    got = [(s["end"] - s["start"], s["p"], s["d"], s["launch"]) for s in steps if lo <= s["p"] < hi]
    if got: print("  steps with %d to %d prompt tokens: n %d, median %.1f ms for %d tokens, %d decodes, launched in %.1f, p99 %.1f ms" % (lo, hi, len(got), *(m * (1, 1e3)[k in (0, 3)] for k, m in enumerate(st.median(c) for c in zip(*got))), q([g[3] for g in got], .99)))
for rid in sorted(ttft, key=ttft.get)[-10:]:
    t0, n = sub[rid]; i = first[rid]
    during = [s for s in steps[: i + 1] if s["end"] > t0]
    print("  slow: %.1f ms, prompt %d:" % (ttft[rid] * 1e3, n), "; ".join("%s%.1f..%.1f d%d p%d%s" % ("*" if any(c[0] == rid for c in s["chunks"]) else "", (s["start"] - t0) * 1e3, (s["end"] - t0) * 1e3, s["d"], s["p"], " sched%.1f" % ((s["at"] - t0) * 1e3)) for s in during))
P

now() { python3 -c 'import time; print(time.time())'; }
start() { # NAME PYTHONPATH MODEL FLAGS...: start a server and print when it answers
  local name=$1 path=$2 model=$3; shift 3; local t0 health=; t0=$(now)
  PYTHONPATH=$path minisgl launch --model "$work/$model" --dummy-weight --max-seq-len-override 4096 --port $port --log-level info "$@" > "$out/$name.log" 2>&1 & server=$!
  for _ in $(seq 900); do
    if [ -z "$health" ] && curl -sf "http://127.0.0.1:$port/health" > /dev/null; then health=$(now); fi
    curl -sf "http://127.0.0.1:$port/ready" > /dev/null && break
    kill -0 $server 2> /dev/null || { echo "$name: the server ended"; tail -5 "$out/$name.log"; return 1; }
    sleep 0.1
  done
  python3 -c "import sys, time; a, h = map(float, sys.argv[2:]); print('%s: /health after %.1f s, /ready after %.1f s' % (sys.argv[1], h - a, time.time() - a))" "$name" "$t0" "$health"
  grep -E " in [0-9.]+ s|device memory|^attn|compiled|^max_step" "$out/$name.log" | cut -c1-230
}
stop() { kill -TERM $server 2> /dev/null; for _ in $(seq 60); do kill -0 $server 2> /dev/null || break; sleep 0.2; done; kill -9 $server 2> /dev/null; wait $server 2> /dev/null; pgrep -af "kernel_compiler|cicc|ptxas" | head -3; }
caches() { [ "${caches:-}" = keep ] || rm -rf "$work/cache-$1"; export XDG_CACHE_HOME=$work/cache-$1/xdg TRITON_CACHE_DIR=$work/cache-$1/triton FLASHINFER_WORKSPACE_BASE=$work/cache-$1; mkdir -p "$XDG_CACHE_HOME" "$FLASHINFER_WORKSPACE_BASE"; }
load() { # NAME RATE NUM
  PYTHONPATH=$new timeout 120 minisgl bench serve --url "http://127.0.0.1:$port" --request-rate "$2" --num-requests "$3" --input-len 256:768 --output-len 128:384 --seed 7 --num-warmups 4 \
    --vocab-size 100000 --json "$out/$1.json" --details > "$out/$1.txt" 2>&1
  grep -E "^run|completed|/s  (time|inter)" "$out/$1.txt"
}

case $mode in
starts)
  for m in qwen3-0.6b qwen3-14b; do
    caches $m
    START_SAMPLE=$out/sample-first-$m start first-$m "$new" $m; stop
    START_SAMPLE=$out/sample-second-$m start second-$m "$new" $m; stop
  done
  for f in "$out"/sample-*; do if grep -q "samples of 20 ms, engine" "$f"; then echo "== $f"; cut -c1-150 "$f"; fi; done
  caches=keep caches qwen3-0.6b; t0=$(now)
  PYTHONPATH=$new timeout 110 minisgl launch --compile-only --model "$work/qwen3-0.6b" --dummy-weight --max-seq-len-override 4096 2>&1 | tail -3
  python3 -c "import time; print('--compile-only: %.1f s' % (time.time() - $t0))"
  start third-qwen3-0.6b "$new" qwen3-0.6b; stop
  ;;
load)
  caches load
  for v in ${VERSIONS:-new base}; do
    path=$new; [ $v = base ] && path=$base
    STEP_TRACE=$out/trace-$v start load-$v "$path" qwen3-14b ${FLAGS:-} || continue
    for rate in ${RATES:-8}; do
      since=$(python3 -c "import time; print(time.monotonic())")
      load load-$v-$rate $rate $((rate * ${LOAD_S:-40}))
      PYTHONPATH=$new python3 "$work/report.py" "$out/trace-$v" "$since"
    done
    stop
  done
  ;;
esac
