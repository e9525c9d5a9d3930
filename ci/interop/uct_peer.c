/*
 * A UCX process that does what it is told: one UD interface of libuct, driven by lines on standard input, one answer line
 * each, so that a test can put UCX into situations where its perftest never is. Built and started by ci/interop/ucx-libuct;
 * the test itself is tests/src/bin/ucx_interop.rs.
 *
 *   open DEVICE                             ok DEVICE_ADDRESS IFACE_ADDRESS UCX_MAJOR UCX_MINOR
 *   ep N                                    ok ENDPOINT_ADDRESS       an endpoint to be connected by `join`
 *   join N DEVICE_ADDRESS ENDPOINT_ADDRESS  ok
 *   to N DEVICE_ADDRESS IFACE_ADDRESS       ok                        connect to an interface
 *   send N FORM STREAM SIZE COUNT           ok                        queues; FORM is short, bcopy or zcopy
 *   flush N                                 ok                        all that was queued is acknowledged
 *   wait STREAM COUNT                       ok                        so many have arrived, each once and in order
 *   destroy N                               ok
 *   quit                                    ok                        endpoints and interface are closed in order
 *
 * An answer may also be "error WHAT". A message is STREAM (u32), its number in the stream (u32), and a pattern.
 */
#include <uct/api/uct.h>
#include <uct/api/version.h>
#include <ucs/async/async_fwd.h>
#include <ucs/sys/string.h>

#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define AM_ID     3
#define EPS       64
#define STREAMS   256
#define BYTES     8192
#define PATIENCE  60 /* seconds that a command may take */

enum form { SHORT, BCOPY, ZCOPY };

struct job {
    int         is_on;
    enum form   form;
    uint32_t    stream;
    size_t      size;
    uint32_t    left;
};

static ucs_async_context_t *async;
static uct_worker_h         worker;
static uct_md_h             md;
static uct_iface_h          iface;
static uct_iface_attr_t     attr;
static uct_ep_h             eps[EPS];
static struct job           jobs[EPS][8];
static uint32_t             sent[STREAMS];   /* next number per stream */
static uint32_t             arrived[STREAMS];
static char                 wrong[256];
static uint8_t              pattern[BYTES];
static uct_mem_h            pattern_mem;
static uct_completion_t     zcopy_done;      /* counts zero-copy sends under way */

static const uint8_t *payload(uint32_t number)
{
    return pattern + number % 251;
}

static void answer(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

static int failed(const char *what, ucs_status_t status)
{
    if (status == UCS_OK) {
        return 0;
    }
    answer("error %s: %s", what, ucs_status_string(status));
    return 1;
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static ucs_status_t receive(void *arg, void *data, size_t length, unsigned flags)
{
    uint32_t head[2];

    if (length >= sizeof(head)) {
        memcpy(head, data, sizeof(head));
        if (head[0] < STREAMS && head[1] == arrived[head[0]] &&
            !memcmp((char*)data + sizeof(head), payload(head[1]), length - sizeof(head))) {
            arrived[head[0]]++;
            return UCS_OK;
        }
        if (!wrong[0]) {
            snprintf(wrong, sizeof(wrong), "stream %u: message %u of %zu bytes where %u was due, or its content is wrong",
                     head[0], head[1], length, head[0] < STREAMS ? arrived[head[0]] : 0);
        }
    } else if (!wrong[0]) {
        snprintf(wrong, sizeof(wrong), "a message of %zu bytes", length);
    }
    return UCS_OK;
}

static ucs_status_t on_error(void *arg, uct_ep_h ep, ucs_status_t status)
{
    if (!wrong[0]) {
        snprintf(wrong, sizeof(wrong), "an endpoint failed: %s", ucs_status_string(status));
    }
    return UCS_OK;
}

static void on_zcopy(uct_completion_t *comp)
{
}

struct pack {
    uint32_t stream, number;
    size_t   size;
};

static size_t pack(void *dest, void *arg)
{
    struct pack *p = arg;

    memcpy(dest, &p->stream, 4);
    memcpy((char*)dest + 4, &p->number, 4);
    memcpy((char*)dest + 8, payload(p->number), p->size - 8);
    return p->size;
}

/* One message of a job; its status. */
static ucs_status_t send_one(uct_ep_h ep, struct job *job)
{
    struct pack p = {job->stream, sent[job->stream], job->size};
    uint64_t header;
    ucs_status_t status;
    ssize_t packed;
    uct_iov_t iov;

    memcpy(&header, &p, sizeof(header));
    switch (job->form) {
    case SHORT:
        return uct_ep_am_short(ep, AM_ID, header, payload(p.number), job->size - 8);
    case BCOPY:
        packed = uct_ep_am_bcopy(ep, AM_ID, pack, &p, 0);
        return (packed < 0) ? (ucs_status_t)packed : UCS_OK;
    default:
        iov.buffer = (void*)payload(p.number);
        iov.length = job->size - 8;
        iov.memh   = pattern_mem;
        iov.stride = 0;
        iov.count  = 1;
        zcopy_done.count++;
        status = uct_ep_am_zcopy(ep, AM_ID, &header, sizeof(header), &iov, 1, 0, &zcopy_done);
        if (status == UCS_INPROGRESS) {
            return UCS_OK;
        }
        zcopy_done.count--;
        return status;
    }
}

static void progress(void)
{
    int i;

    for (i = 0; i < EPS; i++) {
        while (jobs[i][0].is_on) {
            ucs_status_t status = send_one(eps[i], &jobs[i][0]);
            if (status == UCS_ERR_NO_RESOURCE) {
                break;
            }
            if (status != UCS_OK) {
                if (!wrong[0]) {
                    snprintf(wrong, sizeof(wrong), "a send: %s", ucs_status_string(status));
                }
                jobs[i][0].left = 1;
            } else {
                sent[jobs[i][0].stream]++;
            }
            if (--jobs[i][0].left == 0) {
                memmove(&jobs[i][0], &jobs[i][1], 7 * sizeof(struct job));
                memset(&jobs[i][7], 0, sizeof(struct job));
            }
        }
    }
    uct_worker_progress(worker);
    sched_yield();
}

/* Hexadecimal, in turns in one of two buffers. */
static const char *hex(const void *bytes, size_t n)
{
    static char text[2][256];
    static int turn;
    size_t i;

    turn = !turn;
    for (i = 0; i < n && i < 127; i++) {
        sprintf(text[turn] + 2 * i, "%02x", ((const uint8_t*)bytes)[i]);
    }
    return text[turn];
}

static void unhex(const char *text, uint8_t *bytes, size_t max)
{
    size_t i;
    unsigned b;

    for (i = 0; i < max && sscanf(text + 2 * i, "%2x", &b) == 1; i++) {
        bytes[i] = b;
    }
}

static uct_md_h open_domain(const char *device)
{
    uct_component_h *components;
    unsigned n, i, j, k, count;

    if (uct_query_components(&components, &n) != UCS_OK) {
        return NULL;
    }
    for (i = 0; i < n; i++) {
        uct_component_attr_t c = {.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT};
        if (uct_component_query(components[i], &c) != UCS_OK || !c.md_resource_count) {
            continue;
        }
        c.field_mask   = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCES;
        c.md_resources = calloc(c.md_resource_count, sizeof(*c.md_resources));
        if (uct_component_query(components[i], &c) != UCS_OK) {
            continue;
        }
        for (j = 0; j < c.md_resource_count; j++) {
            uct_md_config_t *config;
            uct_tl_resource_desc_t *tls;
            uct_md_h m;

            if (strncmp(c.md_resources[j].md_name, device, strcspn(device, ":")) ||
                uct_md_config_read(components[i], NULL, NULL, &config) != UCS_OK) {
                continue;
            }
            if (uct_md_open(components[i], c.md_resources[j].md_name, config, &m) != UCS_OK) {
                continue;
            }
            if (uct_md_query_tl_resources(m, &tls, &count) == UCS_OK) {
                for (k = 0; k < count; k++) {
                    if (!strcmp(tls[k].tl_name, "ud_verbs") && !strcmp(tls[k].dev_name, device)) {
                        return m;
                    }
                }
            }
            uct_md_close(m);
        }
    }
    return NULL;
}

static void do_open(const char *device)
{
    uct_iface_params_t params = {0};
    uct_iface_config_t *config;
    uint8_t dev[128], own[128];
    int i;

    md = open_domain(device);
    if (md == NULL) {
        answer("error no ud_verbs on %s", device);
        return;
    }
    params.field_mask           = UCT_IFACE_PARAM_FIELD_OPEN_MODE | UCT_IFACE_PARAM_FIELD_DEVICE |
                                  UCT_IFACE_PARAM_FIELD_ERR_HANDLER | UCT_IFACE_PARAM_FIELD_ERR_HANDLER_ARG |
                                  UCT_IFACE_PARAM_FIELD_ERR_HANDLER_FLAGS;
    params.open_mode            = UCT_IFACE_OPEN_MODE_DEVICE;
    params.mode.device.tl_name  = "ud_verbs";
    params.mode.device.dev_name = device;
    params.err_handler          = on_error;
    if (failed("configuration", uct_md_iface_config_read(md, "ud_verbs", NULL, NULL, &config)) ||
        failed("interface", uct_iface_open(md, worker, &params, config, &iface))) {
        return;
    }
    uct_config_release(config);
    for (i = 0; i < BYTES; i++) {
        pattern[i] = 7 * i;
    }
    zcopy_done.func   = on_zcopy;
    zcopy_done.status = UCS_OK;
    if (failed("memory", uct_md_mem_reg(md, pattern, BYTES, UCT_MD_MEM_ACCESS_ALL, &pattern_mem)) ||
        failed("attributes", uct_iface_query(iface, &attr)) ||
        failed("handler", uct_iface_set_am_handler(iface, AM_ID, receive, NULL, 0)) ||
        failed("device address", uct_iface_get_device_address(iface, (uct_device_addr_t*)dev)) ||
        failed("interface address", uct_iface_get_address(iface, (uct_iface_addr_t*)own))) {
        return;
    }
    uct_iface_progress_enable(iface, UCT_PROGRESS_SEND | UCT_PROGRESS_RECV);
    answer("ok %s %s %d %d", hex(dev, attr.device_addr_len), hex(own, attr.iface_addr_len), UCT_VERNO_MAJOR,
           UCT_VERNO_MINOR);
}

static void do_ep(int n)
{
    uct_ep_params_t params = {.field_mask = UCT_EP_PARAM_FIELD_IFACE, .iface = iface};
    uint8_t address[128];

    if (failed("endpoint", uct_ep_create(&params, &eps[n])) ||
        failed("endpoint address", uct_ep_get_address(eps[n], (uct_ep_addr_t*)address))) {
        return;
    }
    answer("ok %s", hex(address, attr.ep_addr_len));
}

static void do_join(int n, const char *dev, const char *ep)
{
    uint8_t device[128] = {0}, endpoint[128] = {0};

    unhex(dev, device, sizeof(device));
    unhex(ep, endpoint, sizeof(endpoint));
    if (!failed("connect", uct_ep_connect_to_ep(eps[n], (uct_device_addr_t*)device, (uct_ep_addr_t*)endpoint))) {
        answer("ok");
    }
}

static void do_to(int n, const char *dev, const char *to)
{
    uint8_t device[128] = {0}, interface[128] = {0};
    uct_ep_params_t params;

    unhex(dev, device, sizeof(device));
    unhex(to, interface, sizeof(interface));
    params.field_mask = UCT_EP_PARAM_FIELD_IFACE | UCT_EP_PARAM_FIELD_DEV_ADDR | UCT_EP_PARAM_FIELD_IFACE_ADDR;
    params.iface      = iface;
    params.dev_addr   = (uct_device_addr_t*)device;
    params.iface_addr = (uct_iface_addr_t*)interface;
    if (!failed("endpoint", uct_ep_create(&params, &eps[n]))) {
        answer("ok");
    }
}

static void do_send(int n, const char *form, unsigned stream, unsigned size, unsigned count)
{
    enum form f = !strcmp(form, "short") ? SHORT : !strcmp(form, "bcopy") ? BCOPY : ZCOPY;
    size_t max  = (f == SHORT) ? attr.cap.am.max_short : (f == BCOPY) ? attr.cap.am.max_bcopy : attr.cap.am.max_zcopy;
    int k;

    if (size < 8 || size > max || size > BYTES - 251 || stream >= STREAMS) {
        answer("error %s of %u bytes on stream %u: 8 to %zu bytes", form, size, stream, max);
        return;
    }
    for (k = 0; k < 8 && jobs[n][k].is_on; k++) {
    }
    if (k == 8) {
        answer("error too many jobs");
        return;
    }
    jobs[n][k] = (struct job){.is_on = count > 0, .form = f, .stream = stream, .size = size, .left = count};
    answer("ok");
}

/* Progresses until `done`, something is wrong, or for too long. */
static int until(const char *what, int (*done)(int, uint32_t), int n, uint32_t count)
{
    double end = now() + PATIENCE;

    while (!done(n, count)) {
        progress();
        if (wrong[0]) {
            answer("error %s", wrong);
            return 0;
        }
        if (now() > end) {
            answer("error %s: not within %d s", what, PATIENCE);
            return 0;
        }
    }
    return 1;
}

static int is_queue_empty(int n, uint32_t unused)
{
    return !jobs[n][0].is_on;
}

static int is_flushed(int n, uint32_t unused)
{
    return uct_ep_flush(eps[n], 0, NULL) == UCS_OK;
}

static int is_zcopy_done(int n, uint32_t unused)
{
    return zcopy_done.count == 0;
}

static int has_arrived(int stream, uint32_t count)
{
    return arrived[stream] >= count;
}

static void do_quit(void)
{
    int i;

    for (i = 0; i < EPS; i++) {
        if (eps[i] != NULL) {
            uct_ep_destroy(eps[i]);
        }
    }
    if (iface != NULL) {
        uct_iface_close(iface);
        uct_md_mem_dereg(md, pattern_mem);
        uct_md_close(md);
    }
    uct_worker_destroy(worker);
    ucs_async_context_destroy(async);
    answer("ok");
    exit(0);
}

static void command(char *line)
{
    char word[16] = "", a[300] = "", b[300] = "";
    unsigned n = 0, x = 0, y = 0, z = 0;

    sscanf(line, "%15s %u", word, &n);
    if (!strcmp(word, "open") && sscanf(line, "%*s %299s", a) == 1) {
        do_open(a);
    } else if (!strcmp(word, "quit")) {
        do_quit();
    } else if (!strcmp(word, "wait") && n < STREAMS && sscanf(line, "%*s %*u %u", &x) == 1) {
        if (until("wait", has_arrived, n, x)) {
            /* One too many is as wrong as one too few. */
            if (arrived[n] > x) {
                answer("error stream %u: %u messages, expected %u", n, arrived[n], x);
            } else {
                answer("ok");
            }
        }
    } else if (n >= EPS || iface == NULL) {
        answer("error endpoint %u: there are %d, and none before `open`", n, EPS);
    } else if (!strcmp(word, "ep")) {
        do_ep(n);
    } else if (!strcmp(word, "join") && sscanf(line, "%*s %*u %299s %299s", a, b) == 2) {
        do_join(n, a, b);
    } else if (!strcmp(word, "to") && sscanf(line, "%*s %*u %299s %299s", a, b) == 2) {
        do_to(n, a, b);
    } else if (!strcmp(word, "send") && sscanf(line, "%*s %*u %299s %u %u %u", a, &x, &y, &z) == 4) {
        do_send(n, a, x, y, z);
    } else if (!strcmp(word, "flush")) {
        if (until("sending", is_queue_empty, n, 0) && until("flush", is_flushed, n, 0) &&
            until("zero copy", is_zcopy_done, n, 0)) {
            answer("ok");
        }
    } else if (!strcmp(word, "destroy")) {
        uct_ep_destroy(eps[n]);
        eps[n] = NULL;
        memset(jobs[n], 0, sizeof(jobs[n]));
        answer("ok");
    } else {
        answer("error no such command: %s", line);
    }
}

int main(void)
{
    static char line[4096];
    size_t have = 0;

    if (failed("async", ucs_async_context_create(UCS_ASYNC_MODE_THREAD_SPINLOCK, &async)) ||
        failed("worker", uct_worker_create(async, UCS_THREAD_MODE_SINGLE, &worker))) {
        return 1;
    }
    for (;;) {
        struct pollfd in = {.fd = 0, .events = POLLIN};
        char *end;

        progress();
        if (poll(&in, 1, 0) > 0) {
            ssize_t n = read(0, line + have, sizeof(line) - have - 1);
            if (n <= 0) {
                return 0;
            }
            have += n;
            line[have] = 0;
        }
        while ((end = memchr(line, '\n', have)) != NULL) {
            *end = 0;
            command(line);
            have -= end + 1 - line;
            memmove(line, end + 1, have);
        }
    }
}
