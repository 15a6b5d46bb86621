/* Compares uring_abi.h with the kernel's header at compile time, if that exists and is of Linux 5.19 or newer. */
#ifndef TIERING_AIO_URING_ABI_CHECK_H
#define TIERING_AIO_URING_ABI_CHECK_H

#include <stddef.h>

#include "uring_abi.h"

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#ifdef IORING_RSRC_REGISTER_SPARSE /* 5.19 */
#define SAME(ours, kernels) _Static_assert((unsigned long long)(ours) == (unsigned long long)(kernels), #ours)
#define SAME_SIZE(name) SAME(sizeof(struct uring_##name), sizeof(struct io_uring_##name))
#define SAME_FIELD(name, field)                                                                              \
    SAME(offsetof(struct uring_##name, field), offsetof(struct io_uring_##name, field))

SAME_SIZE(sqe);
SAME_FIELD(sqe, fd);
SAME_FIELD(sqe, off);
SAME_FIELD(sqe, addr);
SAME_FIELD(sqe, len);
SAME(offsetof(struct uring_sqe, op_flags), offsetof(struct io_uring_sqe, fsync_flags));
SAME(offsetof(struct uring_sqe, op_flags), offsetof(struct io_uring_sqe, poll32_events));
SAME_FIELD(sqe, user_data);
SAME_FIELD(sqe, buf_index);
SAME_SIZE(cqe);
SAME_FIELD(cqe, res);
SAME_SIZE(params);
SAME_FIELD(params, features);
SAME_FIELD(params, sq_off);
SAME_FIELD(params, cq_off);
SAME(offsetof(struct uring_sq_offsets, array), offsetof(struct io_sqring_offsets, array));
SAME(offsetof(struct uring_cq_offsets, cqes), offsetof(struct io_cqring_offsets, cqes));
SAME_SIZE(getevents_arg);
SAME_FIELD(getevents_arg, ts);
SAME_SIZE(files_update);
SAME_FIELD(files_update, fds);
SAME_SIZE(rsrc_register);
SAME_FIELD(rsrc_register, flags);
SAME_SIZE(rsrc_update2);
SAME_FIELD(rsrc_update2, data);
SAME_FIELD(rsrc_update2, nr);
SAME(URING_OP_FSYNC, IORING_OP_FSYNC);
SAME(URING_OP_READ_FIXED, IORING_OP_READ_FIXED);
SAME(URING_OP_WRITE_FIXED, IORING_OP_WRITE_FIXED);
SAME(URING_OP_POLL_ADD, IORING_OP_POLL_ADD);
SAME(URING_OP_READ, IORING_OP_READ);
SAME(URING_OP_WRITE, IORING_OP_WRITE);
SAME(URING_REGISTER_FILES, IORING_REGISTER_FILES);
SAME(URING_UNREGISTER_FILES, IORING_UNREGISTER_FILES);
SAME(URING_REGISTER_FILES_UPDATE, IORING_REGISTER_FILES_UPDATE);
SAME(URING_REGISTER_ENABLE_RINGS, IORING_REGISTER_ENABLE_RINGS);
SAME(URING_REGISTER_BUFFERS2, IORING_REGISTER_BUFFERS2);
SAME(URING_REGISTER_BUFFERS_UPDATE, IORING_REGISTER_BUFFERS_UPDATE);
SAME(URING_UNREGISTER_BUFFERS, IORING_UNREGISTER_BUFFERS);
SAME(URING_SETUP_CLAMP, IORING_SETUP_CLAMP);
SAME(URING_SETUP_R_DISABLED, IORING_SETUP_R_DISABLED);
SAME(URING_SETUP_SUBMIT_ALL, IORING_SETUP_SUBMIT_ALL);
SAME(URING_SETUP_COOP_TASKRUN, IORING_SETUP_COOP_TASKRUN);
SAME(URING_FEAT_SINGLE_MMAP, IORING_FEAT_SINGLE_MMAP);
SAME(URING_FEAT_NODROP, IORING_FEAT_NODROP);
SAME(URING_FEAT_EXT_ARG, IORING_FEAT_EXT_ARG);
SAME(URING_ENTER_GETEVENTS, IORING_ENTER_GETEVENTS);
SAME(URING_ENTER_EXT_ARG, IORING_ENTER_EXT_ARG);
SAME(URING_SQE_FIXED_FILE, 1u << IOSQE_FIXED_FILE_BIT);
SAME(URING_FSYNC_DATASYNC, IORING_FSYNC_DATASYNC);
SAME(URING_RSRC_REGISTER_SPARSE, IORING_RSRC_REGISTER_SPARSE);
SAME(URING_OFF_SQ_RING, IORING_OFF_SQ_RING);
SAME(URING_OFF_SQES, IORING_OFF_SQES);
#ifdef IORING_SETUP_DEFER_TASKRUN /* 6.1 */
SAME(URING_SETUP_SINGLE_ISSUER, IORING_SETUP_SINGLE_ISSUER);
SAME(URING_SETUP_DEFER_TASKRUN, IORING_SETUP_DEFER_TASKRUN);
#endif
#endif

#endif
