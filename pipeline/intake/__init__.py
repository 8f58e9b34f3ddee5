"""From a job's input to planned requests.

`manifest` turns a folder, glob, video or table into rows; `requests` gives each one its id
(`identity`), drops those that have an output row, reads the videos' headers and plans their frames.
`survey` runs this in a process beside the driver, so that the driver imports neither PyTorch nor
transformers; `prefetch` is the bounded queue between the two.

No frame is decoded and no wave is planned here, and nothing imports Ray.
"""
