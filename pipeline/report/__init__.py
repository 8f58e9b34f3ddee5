"""Progress, metrics and records of a run under way, and the HTML report of its output.

During a run `monitor.RunMonitor` receives every wave, row and snapshot of the driver, and passes
them to four parts: `tally` (sums over rows), `progress` (a progress bar or log lines on standard
error), `metrics` (Prometheus, through Ray) and `runs` (a record in `<output>/_runs/`).

After a run `page.write_report` reads the output's rows, its `_summary.json` and the records of its
runs, and writes `<output>/_report.html`. `data`, `buckets` and `time_series` compute, `figures` and
`tables` select what is shown, `templates/` holds the page.

Nothing here imports Ray or changes how a run proceeds, and no other part of the project reads
`_runs/` or `_report.html`.
"""
