"""How what a cell trains is found and handed to the strategy.

component_groups   what shares a parameter is one component
components         the strategy sets each up (set_up_component), and again when its form has changed (component_form)
in_cell_models     models that the cell makes; weight_draws: what it draws for them; meta_init: `nbtrain.empty()`
whole              `with whole(...)`: whole_blocks does it, shown_tensors are complete, taken_tensors left; read_guard
replace_references finds who holds a tensor that another one takes the place of
"""
