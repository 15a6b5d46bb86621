/* The part of the kernel's io_uring interface that backend_uring.c uses.
 *
 * Declared here because the kernel headers of a build machine are often older than the kernels that a wheel runs on.
 * Released numbers and layouts never change; if <linux/io_uring.h> exists and is new enough, uring_abi_check.h
 * compares them at compile time. Source: io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
 */
#ifndef TIERING_AIO_URING_ABI_H
#define TIERING_AIO_URING_ABI_H

#include <stdint.h>

enum { /* system call numbers, equal on all architectures except alpha */
       URING_SYS_SETUP = 425,
       URING_SYS_ENTER = 426,
       URING_SYS_REGISTER = 427,
};

enum uring_opcode {
    URING_OP_FSYNC = 3,
    URING_OP_READ_FIXED = 4,
    URING_OP_WRITE_FIXED = 5,
    URING_OP_POLL_ADD = 6,
    URING_OP_READ = 22,
    URING_OP_WRITE = 23,
};

enum uring_register {
    URING_REGISTER_FILES = 2,
    URING_UNREGISTER_FILES = 3,
    URING_REGISTER_FILES_UPDATE = 6,
    URING_REGISTER_ENABLE_RINGS = 12,
    URING_REGISTER_BUFFERS2 = 15,
    URING_REGISTER_BUFFERS_UPDATE = 16,
    URING_UNREGISTER_BUFFERS = 1,
};

#define URING_SETUP_CLAMP (1u << 4)
#define URING_SETUP_R_DISABLED (1u << 6)
#define URING_SETUP_SUBMIT_ALL (1u << 7)
#define URING_SETUP_COOP_TASKRUN (1u << 8)
#define URING_SETUP_SINGLE_ISSUER (1u << 12)
#define URING_SETUP_DEFER_TASKRUN (1u << 13)

#define URING_FEAT_SINGLE_MMAP (1u << 0)
#define URING_FEAT_NODROP (1u << 1)
#define URING_FEAT_EXT_ARG (1u << 8)

#define URING_ENTER_GETEVENTS (1u << 0)
#define URING_ENTER_EXT_ARG (1u << 3)

#define URING_SQE_FIXED_FILE (1u << 0)
#define URING_FSYNC_DATASYNC (1u << 0)
#define URING_RSRC_REGISTER_SPARSE (1u << 0)

#define URING_OFF_SQ_RING UINT64_C(0)
#define URING_OFF_SQES UINT64_C(0x10000000)

struct uring_sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t off;
    uint64_t addr;
    uint32_t len;
    uint32_t op_flags; /* fsync_flags, poll32_events, by operation */
    uint64_t user_data;
    uint16_t buf_index;
    uint16_t personality;
    int32_t file_index;
    uint64_t rest[2];
};

struct uring_cqe {
    uint64_t user_data;
    int32_t res;
    uint32_t flags;
};

struct uring_sq_offsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
    uint64_t user_addr;
};

struct uring_cq_offsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
    uint64_t user_addr;
};

struct uring_params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
    struct uring_sq_offsets sq_off;
    struct uring_cq_offsets cq_off;
};

struct uring_getevents_arg {
    uint64_t sigmask;
    uint32_t sigmask_sz, min_wait_usec;
    uint64_t ts;
};

struct uring_timespec {
    int64_t tv_sec;
    long long tv_nsec;
};

struct uring_files_update {
    uint32_t offset, resv;
    uint64_t fds;
};

struct uring_rsrc_register {
    uint32_t nr, flags;
    uint64_t resv2, data, tags;
};

struct uring_rsrc_update2 {
    uint32_t offset, resv;
    uint64_t data, tags;
    uint32_t nr, resv2;
};

#endif
