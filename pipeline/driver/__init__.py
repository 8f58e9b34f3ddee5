"""Runs the requests of a job's waves on engines in a Ray cluster.

The flow of one request, and where `state.RunState` keeps it:

1. `WaveSource.take` returns a wave. Its requests are grouped by the video that is decoded in one
   pass, and wait in `Replica.undecoded`.
2. A decode task runs (`RunState.decodes`). From now on the request is in flight. The task is
   started for the replica with the least work ahead, within a limit of requests per replica and
   a limit of bytes of frames for the whole run (`decode_queue`).
3. The frames are in the object store. The request waits in `Replica.decoded`.
4. `Backend.feed` sends it to the engine, a few requests more than the engine has slots, one engine
   config after the other (`feeder`). It is in `EngineState.requests`.
5. The engine's stream returns the result. The driver calls `on_completed` and forgets the request.
   The last request of a video releases its frames.

Invariants:

- One thread, in `driver.Driver`, changes the state. Everything else reads it.
- Every request is completed exactly once: completion removes it from `RunState.in_flight`, and a
  result of a request that is not in its engine's `requests` is dropped.
- An engine decodes with one config at a time, and never gets a request twice.
- Frames that are decoding or kept exceed `max_frame_bytes` only if one video alone does.

What happens on a failure:

- An engine dies, or makes no progress for `engine_timeout` seconds: it is killed and replaced. Its
  requests are suspects and run again in an engine of their own, in halves if that dies too. Only a
  request that ends two engines alone gets an error row (`suspects`). Requests that were decoded for
  the dead engine go to the next engine that has room.
- An engine runs out of memory: it is replaced, its requests run again, and all replicas have half
  the slots from then on.
- A decode task's process dies: the video is decoded again, three times at most. Other decode errors
  are the video's own and fail its requests at once.
- Frames are lost with their machine: they are decoded again.
- Three engines in a row die without a request, the first three requests all end their engines, or
  nothing makes progress for `stall_timeout` seconds: the run ends with a RunError.
- SIGINT or SIGTERM: no more requests are fed, engines get 20 s to finish those they have, and the
  run ends with a RunError.

`backend` defines the interfaces to the outside and `cluster` starts everything. `ray_backend`,
`engine_actor` and `decode_task` implement the backend on Ray. `driver`, `state`, `decode_queue`,
`feeder` and `suspects` import no Ray, so that tests can run them on a simulated backend that fails
at random.
"""
