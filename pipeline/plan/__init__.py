"""From planned requests to waves: which requests an engine gets together, in how many slots, and
with which draft.

`waves.plan` is a pure function of the pool, a device profile, the run's history and the job's wave
configuration. It uses `choose.DraftPlanner`, which predicts with `round_time.RoundPredictor` and
`capacity.Capacity`. `pool.RequestPool` calls it during a run, `dryrun` reports on it beforehand.
Nothing here decodes a frame, knows an engine or imports Ray.
"""
