"""A client that decides and workers that do: `loom.launch`.

A call on a tensor of a cluster is decided here, on shapes, and queued; the workers, ranks of `meshloom run`, do it on
their parts. From the program to the workers:

    methods.py      what can be done with a `RemoteTensor`       tensors.py     what the client knows of one
    placing.py      tensors made of nothing or of data           gradients.py   who has a gradient
    calls.py        one call: read, looked up, queued            outcomes.py    what a call leads to, decided once
    values.py       arguments as JSON                            session.py     the queue, and the thread that sends it
    wire.py         frames                                       worker.py      the other end
"""
