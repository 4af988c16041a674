"""What several strategies share.

ddp and its kin        replicated, gradient_average, gradient_buckets (`--bucket-mb`, `--comm-dtype`), gradient_graphs,
                       running_statistics
a divided optimizer    per_parameter_optimizers (which ones may be), divided_steps, sharded_state, owned_tensors;
                       step_hooks: around its steps, also for a library's
weights in pieces      row_shards (of DTensors), units_to_wrap, dtensor_operations, saved_pieces; stage_tensor,
                       stage_tensors and stage_spot where one rank has them whole
what is allowed        known_functions, named_tensors (what a refusal says), functional_transforms (`torch.func`); a
                       rank's own number (`p.grad.mul_(c)`): written_numbers, divided_steps (before a step),
                       same_on_ranks
parts of a component   component_tensors; call_arguments: how torch's functions are given them
calls of the model     call_router, split_batch, batch_structure, module_replicas, forward_reads
a library's marks      library_attachments, checkpoint_calls, memory_left_behind
what shows a weight     shown_weights, where its memory does not tell; else stage_tensor, dtensor_operations
what all ranks do      collective_calls, clipping, random_draws
figures for a plan     profile_arithmetic
"""
