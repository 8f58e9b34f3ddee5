"""The output of a job: Parquet parts, a ledger with one record per part, and a lease for the one
driver that may write.

`folder.OutputFolder` names the files and makes every storage call. `writer.OutputWriter` commits
rows, `reader.read` reads them at any time. `ledger`, `lease` and `parts` hold one concept each.
`schema` and `rows` define the columns and fill them. README.md of `pipeline/` describes the
protocol. Nothing here knows engines, videos or Ray.
"""
