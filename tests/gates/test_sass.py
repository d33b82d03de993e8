"""Reading SASS: which instructions a loop holds, wherever ptxas put them."""

from sass import Program


def program(*lines):
    """Instructions and labels, one a line; addresses are added."""
    text = [line if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines)]
    return Program("\n".join(["\t.section\t.text.kernel", ".text.kernel:", *text]))


def test_guards_modifiers_and_padding_do_not_count_as_opcodes():
    found = program("MOV R1, c[0x0][0x28]", "@!UP0 QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", "EXIT", "NOP").opcodes
    assert found == {"MOV": 1, "QGMMA": 1, "EXIT": 1}


def test_a_loop_is_counted_without_what_stands_around_it():
    found = program("MOV R1, R2", ".L_x_0:", "QGMMA R1, R2", "IADD3 R1, R1, 1", "@P0 BRA `(.L_x_0)", "FMUL R1, R1", "EXIT")
    assert found.main_loops("QGMMA") == [{"QGMMA": 1, "IADD3": 1, "BRA": 1}]


def test_cold_blocks_at_the_end_belong_to_the_loop_that_runs_them_and_to_nothing_else():
    found = program(".L_x_0:", "QGMMA R1, R2", "@P0 BRA `(.L_x_2)", ".L_x_1:", "IADD3 R1, R1, 1", "@P1 BRA `(.L_x_0)",
                    "FMUL R1, R1", "EXIT", ".L_x_2:", "SHFL R1, R1", "BRA `(.L_x_1)")
    assert found.main_loops("QGMMA") == [{"QGMMA": 1, "IADD3": 1, "BRA": 3, "SHFL": 1}]


def test_a_block_moved_behind_what_follows_it_makes_no_loop():
    found = program("QGMMA R1, R2", "FMUL R1, R1", "FMUL R1, R1", "@P0 BRA `(.L_x_9)", ".L_x_8:", "MOV R1, R1",
                    ".L_x_0:", "QGMMA R1, R2", "@P1 BRA `(.L_x_0)", "EXIT", ".L_x_9:", "SHFL R1, R1", "BRA `(.L_x_8)")
    assert found.main_loops("QGMMA") == [{"QGMMA": 1, "BRA": 1}]


def test_innermost_loops_count_the_largest_first():
    found = program(".L_x_0:", "MOV R1, R1", ".L_x_1:", "QGMMA R1, R2", "@P0 BRA `(.L_x_1)", "@P1 BRA `(.L_x_0)",
                    ".L_x_2:", "QGMMA R1, R2", "FMUL R1, R2", "@P0 BRA `(.L_x_2)", "EXIT")
    assert found.main_loops("QGMMA") == [{"QGMMA": 1, "FMUL": 1, "BRA": 1}, {"QGMMA": 1, "BRA": 1}]


def test_a_wait_that_spins_stays_inside_the_loop_around_it():
    found = program(".L_x_0:", "QGMMA R1, R2", ".L_x_1:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2", "@!P0 BRA `(.L_x_1)",
                    "@P1 BRA `(.L_x_0)", "EXIT")
    assert found.main_loops("QGMMA") == [{"QGMMA": 1, "SYNCS": 1, "BRA": 2}]


def test_every_branch_of_a_jump_table_is_followed():
    found = program('BRX R4 -0x1230 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)', ".L_x_0:", "EXIT", ".L_x_1:", "QGMMA R1, R2",
                    "BRA.U UP0, `(.L_x_1)", "EXIT")
    assert found.main_loops("QGMMA") == [{"QGMMA": 1, "BRA": 1}]


def test_the_end_of_the_program_and_meeting_points_make_no_loop():
    found = program("BSSY B0, `(.L_x_0)", "QGMMA R1, R2", ".L_x_0:", "BSYNC B0", "EXIT", ".L_x_1:", "BRA `(.L_x_1)")
    assert found.main_loops("QGMMA") == []
