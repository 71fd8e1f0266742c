"""The arithmetic of LLM serving as plain functions of numbers, each with its units and its source.

Five themes: `rates` (roofline, steps, batches, prefill), `memory` (KV, weights, block formats),
`transfer` (links, break-even, offload), `features` (speculation, experts, adapters) and `traffic`
(queues, goodput, money). Bytes are bytes, seconds are seconds, rates are per second; nothing is in
GB, ms or TFLOPS. Nothing here reads a model or a device: `headrace.cost.roofline` prices real
programs op by op, and these functions are what a person checks it against on the back of an
envelope.
"""
