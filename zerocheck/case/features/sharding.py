"""Features of sharding: each is about a field that an implementation may ignore."""

from __future__ import annotations

from .row import table

SHARDING = table(
    ("wrap-whole", "the model is one unit", lambda c: c.sharding.wrap == "whole", "wrap"),
    ("wrap-block", "each block is a unit", lambda c: c.sharding.wrap == "block", "wrap"),
    ("wrap-layer", "each layer is a unit", lambda c: c.sharding.wrap == "layer", "wrap"),
    ("wrap-size", "units by their size", lambda c: c.sharding.wrap == "size", "wrap"),
    ("reshard", "parameters released after the forward", lambda c: c.sharding.reshard, "reshard"),
    (
        "keep-gathered",
        "parameters kept until the backward",
        lambda c: not c.sharding.reshard,
        "reshard",
    ),
    (
        "bucket-small",
        "buckets of 256 elements or less",
        lambda c: c.sharding.bucket <= 256,
        "bucket",
    ),
    ("prefetch-none", "no prefetching", lambda c: c.sharding.prefetch == 0, "prefetch"),
    (
        "prefetch-several",
        "several units prefetched",
        lambda c: c.sharding.prefetch >= 2,
        "prefetch",
    ),
    (
        "backward-prefetch-post",
        "the next unit gathered after the gradients of this one",
        lambda c: c.sharding.backward_prefetch == "post",
        "backward_prefetch",
    ),
    (
        "backward-prefetch-none",
        "no unit gathered ahead in the backward",
        lambda c: c.sharding.backward_prefetch == "none",
        "backward_prefetch",
    ),
    (
        "sync-each",
        "gradients reduced with each of several microbatches",
        lambda c: c.sharding.sync == "each" and c.training.microbatches > 1,
        "sync",
    ),
    (
        "sync-shards",
        "gradients reduced over replicas with the last of several microbatches alone",
        lambda c: c.sharding.sync == "shards" and c.training.microbatches > 1,
        "sync",
    ),
    (
        "flat-parameters",
        "the optimizer sees flat parameters",
        lambda c: not c.sharding.use_orig_params,
        "use_orig_params",
    ),
    (
        "bucket-view",
        "gradients or parameters are views of buckets",
        lambda c: c.sharding.bucket_view,
        "bucket_view",
    ),
    (
        "find-unused",
        "unused parameters are looked for",
        lambda c: c.sharding.find_unused,
        "find_unused",
    ),
    (
        "static-graph",
        "the graph is said to be static",
        lambda c: c.sharding.static_graph,
        "static_graph",
    ),
    (
        "optimizer-first",
        "the optimizer is made before the model is wrapped",
        lambda c: c.sharding.optimizer_first,
        "optimizer_first",
    ),
    (
        "offload",
        "parameters, gradients and states on the CPU",
        lambda c: c.sharding.offload != "none",
        "offload",
    ),
    (
        "offload-pinned",
        "parameters, gradients and states in pinned memory of the CPU",
        lambda c: c.sharding.offload == "pinned",
        "offload",
    ),
    dimension="sharding",
)
