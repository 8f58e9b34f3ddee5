"""From a video file to the frames that a model sees.

`probe` reads the headers, `frame_plan` chooses sample times and frame size from them alone,
`windows` cuts long videos, and `frames` decodes the plan: `sandbox` runs each attempt of a decoder
(`decord_reader`, then `pyav_reader`) in a process with memory and time limits.

Nothing here imports Ray, reads manifests or turns frames into patches, which the engine does.
"""
